//! What depends on the operating system: the boot clock, the identity of threads, file systems and mounts.

#[cfg_attr(target_os = "linux", path = "linux.rs")]
#[cfg_attr(not(target_os = "linux"), path = "other.rs")]
mod system;

pub(crate) use system::*;
