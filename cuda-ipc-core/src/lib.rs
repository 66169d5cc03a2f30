//! Share CUDA memory that only a POSIX file descriptor can carry between processes.
//!
//! Memory of `cuMemCreate` (PyTorch's expandable segments, most new allocators) has no legacy IPC handle. Its exporter can make an fd for each physical
//! chunk; an importer on the same machine can fetch that fd, import it, and map the chunk. This crate is the protocol between the two, and the code that acts
//! on it:
//!
//! | module | what it is | needs |
//! |---|---|---|
//! | [`key`], [`rkey`] | the bytes an exporter sends | nothing |
//! | [`broker`] | the messages by which an exporter hands out fds where they cannot be fetched | nothing |
//! | [`table`] | the exporter's live list of chunks, in shared memory | nothing |
//! | [`export`], [`import`] | state machines: in which order things happen, and how a failure is undone | nothing |
//! | [`diagnosis`] | which cause is behind a refusal, and what to do about it | nothing |
//! | [`dispatch`], [`reason`] | which lane carries memory, or why none does | nothing |
//! | `exporter`, `importer` | run the machines against kernel and driver | feature `std` |
//! | `sys` | system and driver calls: the only unsafe code | feature `std` |
//!
//! Without default features the crate is no_std, allocates nothing and does no I/O: bytes, words and state machines only.
//!
//! Where windows, leases and limits are wanted, use cuda-ipc-cache on top of this.

#![cfg_attr(not(feature = "std"), no_std)]
#![deny(unsafe_code)]
#![warn(clippy::indexing_slicing)]

pub mod broker;
pub mod diagnosis;
pub mod dispatch;
pub mod export;
#[cfg(feature = "std")]
pub mod exporter;
pub mod import;
#[cfg(feature = "std")]
pub mod importer;
pub mod key;
#[cfg(feature = "std")]
mod own_handles;
pub mod reason;
pub mod rkey;
#[cfg(feature = "std")]
pub mod sys;
pub mod table;
#[cfg(feature = "std")]
mod users;

// The examples of the README are run as tests.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;
