//! Share CUDA memory that only a POSIX file descriptor can carry (`cuMemCreate`, POSIX_FD pools) between processes.
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(unsafe_code)]
#![warn(clippy::indexing_slicing)]

pub mod export;
pub mod import;
pub mod key;
pub mod reason;
pub mod rkey;
pub mod table;
