//! The guard: a process between `simba` and the command, which ends the command in time even if `simba` is killed,
//! stopped or hangs.
//!
//! `simba` starts the guard, the guard starts the [trampoline], which becomes the command. Both run the same
//! executable. The guard needs no runtime and no store: it knows the deadlines of the command, gets new ones with
//! every renewal, and ends the command when they pass.

pub(crate) mod handle;
pub(crate) mod process;
pub(crate) mod protocol;
pub(crate) mod trampoline;
pub(crate) mod tree;

pub(crate) use process::guard;
