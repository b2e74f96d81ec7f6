//! Helpers for the fault matrix: every command writes its token to one file repeatedly.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::{Running, World, until, until_true};

/// A lease short enough to wait for. It survives four seconds in which the machine is paused: renewed after 2 s,
/// TERM 2 s before its deadline after 9 s, KILL 1 s before it.
pub const LEASE: [&str; 6] = ["--ttl", "3s", "--transition", "6s", "--grace", "2s"];
/// The length of [`LEASE`].
pub const LEASE_LENGTH: Duration = Duration::from_secs(9);

/// A lease for commands that are ended at its deadline. They get TERM 4.5 s before it and KILL 2.25 s before it, so a
/// command or a guard that is paused for two seconds is still in time. Renewed after 1.3 s, expired after 8 s.
pub const ROOMY_LEASE: [&str; 6] = ["--ttl", "2s", "--transition", "6s", "--grace", "4500ms"];

/// Writes its token every 20 ms, in the order of time. More often, the processes for `sleep` alone keep a machine with
/// two processors busy, since a row has up to four of these loops.
pub const BEAT: &str = "while :; do echo $SIMBA_FENCING_TOKEN >> beats; sleep 0.02; done";

impl World {
    /// Starts a `simba run` of a script under a short lease, with a `-w` that is longer than a store hangs.
    pub fn holder(&self, mutex: &str, script: &str) -> Running {
        self.holder_under(&LEASE, mutex, script)
    }

    /// Starts a [`holder`](Self::holder) under another lease.
    pub fn holder_under(&self, lease: &[&str], mutex: &str, script: &str) -> Running {
        self.spawn(&[&["run", "-w", "60", mutex], lease, &["--", "sh", "-c", script]].concat())
    }

    /// Starts the next holder, which writes its token. It has the default lease: how soon it acquires depends on the
    /// lease of the first holder only.
    pub fn next_holder(&self, mutex: &str) -> Running {
        self.holder_under(&[], mutex, BEAT)
    }

    /// Returns the tokens in the order in which they were written.
    pub fn beats(&self) -> Vec<u64> {
        let file: PathBuf = self.path("beats");
        let text = fs::read_to_string(file).unwrap_or_default();
        text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')?.parse().ok()).collect()
    }

    /// Waits for a token that is greater than this one, and returns it.
    pub fn beat_after(&self, token: u64) -> u64 {
        until("beat of the next holder", || self.find_beat_after(token))
    }

    /// Returns the first token that is greater than this one.
    pub fn find_beat_after(&self, token: u64) -> Option<u64> {
        self.beats().into_iter().find(|beat| *beat > token)
    }

    /// Waits for more tokens: a process that is left would write some of them.
    pub fn more_beats(&self) {
        let seen = self.beats().len();
        until_true("more beats", || self.beats().len() > seen + 20);
    }

    /// Checks that no command wrote its token after a greater one was seen.
    #[track_caller]
    pub fn assert_no_overlap(&self) {
        let beats = self.beats();
        assert!(beats.is_sorted(), "two commands ran at once: {}", changes(&beats));
    }
}

fn changes(beats: &[u64]) -> String {
    let mut changed = Vec::new();
    for (at, beat) in beats.iter().enumerate() {
        if at == 0 || beats[at - 1] != *beat {
            changed.push(format!("{at}: {beat}"));
        }
    }
    changed.join(", ")
}
