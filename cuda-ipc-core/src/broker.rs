//! The broker's protocol: how an importer that may not fetch fds by itself is given them by their exporter.
//!
//! An exporter listens on a Unix socket of type SEQPACKET, whose name both sides can compute from the key's nonce. Each message is one packet and either a
//! [`Request`] of the importer's or an [`Answer`] of the exporter's; fds travel beside it. The importer says one thing at a time:
//!
//! ```text
//!     importer                                  exporter
//!     Hello {challenge}                  ──▶
//!                                        ◀──    Challenge {challenge, proof}
//!     Prove {proof}                      ──▶    (no answer)
//!     Table                              ──▶
//!                                        ◀──    Table                            + the table's fd
//!     Chunks {(slot, generation), ...}   ──▶
//!                                        ◀──    Chunks {outcome, ...}            + an fd for each chunk that was given
//! ```
//!
//! At any point the answer can be [`Answer::Refused`], and the exporter closes the connection then. An importer keeps its connection: its end is the
//! exporter's.
//!
//! - [`message`]: the bytes of all this. Decoding is total; a length that is not exactly the message's is an error.
//! - [`proof`]: names and proofs, made of the nonce by one-way functions.
//!
//! Nothing here sends or receives; that is `exporter::broker` and `importer::broker`.

pub mod message;
pub mod proof;

pub use message::{Answer, BATCH_MAX, Buffer, MessageError, Outcome, Refusal, Request};
pub use proof::{Challenge, Proof, Proofs, SocketName};
