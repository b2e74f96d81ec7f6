//! The whole kit on one server, as a user with the least rights (row 65), below a chroot.

mod common;

simba_tck::suite!(common::as_least());
