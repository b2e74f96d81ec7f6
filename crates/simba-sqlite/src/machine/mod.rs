//! What only the machine can tell: which boot this is, how long it lasts, and where a file really lies.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    BootClock, WaiterThread, create_empty, file_system, is_mount_point, rename_new, room_left,
};

#[cfg(not(target_os = "linux"))]
mod other;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::{
    BootClock, WaiterThread, create_empty, file_system, is_mount_point, rename_new, room_left,
};
