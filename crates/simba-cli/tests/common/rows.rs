//! What the rows of the fault matrix are judged by: beats of commands in one file.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::{Running, World, until};

/// A lease short enough to wait for. It survives two seconds in which the machine stands still: renewed after 2 s,
/// ended 1.5 s before its deadline after 6 s, killed 0.75 s before it.
pub const LEASE: [&str; 4] = ["--ttl", "3s", "--transition", "3s"];
/// How long that is.
pub const LEASE_LENGTH: Duration = Duration::from_secs(6);

/// Writes its token every few milliseconds; the file knows the order.
pub const BEAT: &str = "while :; do echo $SIMBA_FENCING_TOKEN >> beats; sleep 0.005; done";

impl World {
    /// A `simba run` of a script under a short lease, with more patience for a store that hangs than that.
    pub fn holder(&self, mutex: &str, script: &str) -> Running {
        let args = [&["run", "-w", "60", mutex], &LEASE[..], &["--", "sh", "-c", script]].concat();
        self.spawn(&args)
    }

    /// The tokens in the order in which they were written.
    pub fn beats(&self) -> Vec<u64> {
        let file: PathBuf = self.path("beats");
        let text = fs::read_to_string(file).unwrap_or_default();
        text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')?.parse().ok()).collect()
    }

    /// The token of a command that has written under a greater one than this.
    pub fn beat_after(&self, token: u64) -> u64 {
        until("beat of the next", || self.beats().into_iter().find(|beat| *beat > token))
    }

    /// Nobody wrote under a token after a greater one was seen.
    #[track_caller]
    pub fn assert_no_overlap(&self) {
        let beats = self.beats();
        assert!(beats.is_sorted(), "broken: nobody works beside the next: {}", changes(&beats));
    }
}

fn changes(beats: &[u64]) -> String {
    let mut told = Vec::new();
    for (at, beat) in beats.iter().enumerate() {
        if at == 0 || beats[at - 1] != *beat {
            told.push(format!("{at}: {beat}"));
        }
    }
    told.join(", ")
}
