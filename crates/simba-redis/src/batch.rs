//! Calls that go to the server as one.

use simba_core::MutexName;

use crate::pipe::Slot;
use crate::resp;
use crate::scripts::{Keys, Usual};

/// The usual cases of many calls, and who waits for their replies.
#[derive(Default)]
pub(crate) struct Batch {
    digest: String,
    /// In the order of the script: renewals, releases, first looks. Sessions share no call that would have to come
    /// behind one of a later kind.
    kinds: [Kind; 3],
    /// How many keys all of them have, and how many arguments.
    counts: (usize, usize),
}

/// The calls of one kind, as words of a command.
#[derive(Default)]
struct Kind {
    keys: Keys,
    args: Vec<u8>,
    slots: Vec<Slot>,
}

/// With more that somebody waits for, a call costs the server hardly less; and it may begin while others are still to
/// come.
const MOST: usize = 12;
/// With more of any kind, the server would be busy for longer than others should wait for it.
const MOST_UNHURRIED: usize = 32;

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn is_full(&self) -> bool {
        let [renewals, ..] = &self.kinds;
        self.len() >= MOST_UNHURRIED || self.len() - renewals.slots.len() >= MOST
    }

    fn len(&self) -> usize {
        self.kinds.iter().map(|kind| kind.slots.len()).sum()
    }

    pub(crate) fn add(&mut self, usual: &Usual<'_>, mutex: &MutexName, digest: &str, slot: Slot) {
        if self.is_empty() {
            digest.clone_into(&mut self.digest);
        }
        let kind = &mut self.kinds[usual.kind()];
        self.counts.0 += usual.write_keys(mutex, &mut kind.keys);
        self.counts.1 += usual.write_args(&mut kind.args);
        kind.slots.push(slot);
    }

    /// Writes it as one command, and is empty again; who waits, in the order of the replies.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) -> Vec<Slot> {
        let (keys, args) = std::mem::take(&mut self.counts);
        resp::begin(out, 3 + keys + self.kinds.len() + args);
        resp::word(out, b"EVALSHA");
        resp::word(out, self.digest.as_bytes());
        resp::number_word(out, keys as u64);
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.keys.read));
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.keys.waiting));
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.keys.taken));
        self.kinds.iter().for_each(|kind| resp::number_word(out, kind.slots.len() as u64));
        let mut slots = Vec::with_capacity(self.len());
        for kind in &mut self.kinds {
            out.append(&mut kind.args);
            slots.append(&mut kind.slots);
        }
        slots
    }
}
