//! The controlling terminal, which belongs to one process group at a time.

use std::os::fd::OwnedFd;

use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::guard::tree::{is_orphaned, own_group};

/// Blocks SIGTTOU: without this, taking the terminal back from another group would stop this process. Must be called
/// before any thread is started.
pub(crate) fn block_sigttou() {
    let mut signals = SigSet::empty();
    signals.add(NixSignal::SIGTTOU);
    let _ = signals.thread_block();
}

/// The controlling terminal of this process, independent of the standard streams.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: Option<OwnedFd>,
}

impl Terminal {
    pub(crate) fn find() -> Self {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        Self { tty: open("/dev/tty", flags, Mode::empty()).ok() }
    }

    /// Returns the foreground process group.
    pub(crate) fn group(&self) -> Option<Pid> {
        tcgetpgrp(self.tty.as_ref()?).ok()
    }

    /// Returns whether our group is in the foreground, so that the command should be, too.
    pub(crate) fn is_ours(&self) -> bool {
        self.group().is_some_and(|group| own_group() == Some(group))
    }

    /// Gives the terminal to the group of a command, if our group has it.
    pub(crate) fn give(&self, group: Pid) {
        if self.is_ours() {
            self.set(group);
        }
    }

    /// Gives the terminal from the group of a command to another group. A shell that took it meanwhile keeps it.
    pub(crate) fn give_back(&self, from: Pid, to: Pid) {
        if self.group() == Some(from) {
            self.set(to);
        }
    }

    /// Takes the terminal back from the group of a command.
    pub(crate) fn take(&self, from: Pid) {
        if let Some(own) = own_group() {
            self.give_back(from, own);
        }
    }

    fn set(&self, group: Pid) {
        if let Some(tty) = &self.tty {
            let _ = tcsetpgrp(tty, group);
        }
    }

    /// Stops this job until a shell resumes it. Returns false if there is no shell that could resume it.
    pub(crate) fn suspend(&self) -> bool {
        if self.tty.is_none() || is_orphaned() {
            return false;
        }
        // Stop the whole job, as the suspend key does.
        own_group().is_some_and(|group| kill_process_group(group, Signal::TSTP).is_ok())
    }
}
