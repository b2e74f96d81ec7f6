//! Calls that go to the server as one.

use simba_core::MutexName;

use crate::pipe::Slot;
use crate::resp;
use crate::scripts::{Digests, Script, Usual};

/// The usual cases of many calls, and who waits for their replies, in one order.
#[derive(Default)]
pub(crate) struct Batch {
    digest: String,
    keys: Vec<u8>,
    words: Vec<u8>,
    counts: (usize, usize),
    slots: Vec<Slot>,
}

/// With more, a call costs the server hardly less; and it may begin while others are still to come.
const MOST: usize = 16;

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.slots.len() >= MOST
    }

    pub(crate) fn add(&mut self, usual: &Usual<'_>, mutex: &MutexName, digests: &Digests, slot: Slot) {
        if self.is_empty() {
            self.digest.clone_from(&digests[Script::Many as usize]);
        }
        let (keys, words) = usual.write(mutex, &mut self.keys, &mut self.words);
        self.counts = (self.counts.0 + keys, self.counts.1 + words);
        self.slots.push(slot);
    }

    /// Writes it as one command, and is empty again; who waits.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) -> Vec<Slot> {
        let (keys, words) = std::mem::take(&mut self.counts);
        resp::begin(out, 3 + keys + words);
        resp::word(out, b"EVALSHA");
        resp::word(out, self.digest.as_bytes());
        resp::number_word(out, keys as u64);
        out.append(&mut self.keys);
        out.append(&mut self.words);
        std::mem::take(&mut self.slots)
    }
}
