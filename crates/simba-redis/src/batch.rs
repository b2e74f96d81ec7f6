//! Calls that go to the server as one.

use simba_core::MutexName;

use crate::pipe::Slot;
use crate::resp;
use crate::scripts::{Digests, Script, Usual};

/// The usual cases of many calls, and who waits for their replies.
#[derive(Default)]
pub(crate) struct Batch {
    digest: String,
    /// In the order of the script: renewals, releases, first looks. Sessions share no call that would have to come
    /// behind one of a later kind.
    kinds: [Kind; 3],
}

/// The calls of one kind, as words of a command.
#[derive(Default)]
struct Kind {
    /// Of the mutex and its fence.
    keys: Vec<u8>,
    /// Of who waits for the mutex.
    waiting: Vec<u8>,
    args: Vec<u8>,
    /// How many words all that is.
    words: usize,
    /// How many of them are keys.
    key_words: usize,
    slots: Vec<Slot>,
}

/// With more, a call costs the server hardly less; and it may begin while others are still to come.
const MOST: usize = 16;

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= MOST
    }

    fn len(&self) -> usize {
        self.kinds.iter().map(|kind| kind.slots.len()).sum()
    }

    pub(crate) fn add(&mut self, usual: &Usual<'_>, mutex: &MutexName, digests: &Digests, slot: Slot) {
        if self.is_empty() {
            self.digest.clone_from(&digests[Script::Many as usize]);
        }
        let kind = &mut self.kinds[usual.kind()];
        let keys = usual.write_keys(mutex, &mut kind.keys, &mut kind.waiting);
        kind.words += keys + usual.write_args(&mut kind.args);
        kind.key_words += keys;
        kind.slots.push(slot);
    }

    /// Writes it as one command, and is empty again; who waits, in the order of the replies.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) -> Vec<Slot> {
        let sum = |what: fn(&Kind) -> usize| self.kinds.iter().map(what).sum::<usize>();
        let (words, keys) = (sum(|kind| kind.words), sum(|kind| kind.key_words));
        resp::begin(out, 3 + self.kinds.len() + words);
        resp::word(out, b"EVALSHA");
        resp::word(out, self.digest.as_bytes());
        resp::number_word(out, keys as u64);
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.keys));
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.waiting));
        self.kinds.iter().for_each(|kind| resp::number_word(out, kind.slots.len() as u64));
        let mut slots = Vec::with_capacity(self.len());
        for kind in &mut self.kinds {
            out.append(&mut kind.args);
            slots.append(&mut kind.slots);
            (kind.words, kind.key_words) = (0, 0);
        }
        slots
    }
}
