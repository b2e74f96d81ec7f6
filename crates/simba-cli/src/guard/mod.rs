//! The guard: a process between `simba` and the command, which ends the command in time even when `simba` is
//! killed, stopped or hangs.
//!
//! `simba` starts the guard, the guard starts the [trampoline], which becomes the command. Both are the same
//! program once more. The guard needs no runtime and asks no store: it knows until when the command may run,
//! hears of every renewal, and acts when it does not.

pub(crate) mod trampoline;
pub(crate) mod tree;
pub(crate) mod warden;
pub(crate) mod watch;
pub(crate) mod wire;

pub(crate) use watch::guard;
