//! The terminal, which one group of processes has at a time.

use std::os::fd::OwnedFd;

use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::guard::tree::{is_orphaned, own_group};

/// Who takes the terminal back from another group would be stopped for it, were it not for this. Before any
/// thread is started.
pub(crate) fn keep_going() {
    let mut signals = SigSet::empty();
    signals.add(NixSignal::SIGTTOU);
    let _ = signals.thread_block();
}

/// The terminal that controls this process, wherever the standard streams lead.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: Option<OwnedFd>,
}

impl Terminal {
    pub(crate) fn find() -> Self {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        Self { tty: open("/dev/tty", flags, Mode::empty()).ok() }
    }

    /// Which group has it.
    pub(crate) fn group(&self) -> Option<Pid> {
        tcgetpgrp(self.tty.as_ref()?).ok()
    }

    /// Whether our group has it, so that a command is to have it.
    pub(crate) fn is_ours(&self) -> bool {
        self.group().is_some_and(|group| own_group() == Some(group))
    }

    /// Gives it to the group of a command, if it is ours to give.
    pub(crate) fn give(&self, group: Pid) {
        if self.is_ours() {
            self.set(group);
        }
    }

    /// Gives it back from the group of a command: a shell that took it meanwhile keeps it.
    pub(crate) fn give_back(&self, from: Pid, to: Pid) {
        if self.group() == Some(from) {
            self.set(to);
        }
    }

    /// Takes it back from the group of a command.
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

    /// Stands still as a job, until it is told to go on; false if nobody is there who could tell it.
    pub(crate) fn stand_still(&self) -> bool {
        if self.tty.is_none() || is_orphaned() {
            return false;
        }
        // All of the job, as if the keys had been meant for it.
        own_group().is_some_and(|group| kill_process_group(group, Signal::TSTP).is_ok())
    }
}
