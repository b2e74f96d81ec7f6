//! The reference backend: mutexes in the memory of one process.

mod backend;
mod session;
mod store;

pub use backend::MemoryBackend;
