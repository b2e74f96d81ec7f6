//! Batch of script calls that are sent as one command.

use simba_core::MutexName;

use super::ReplySender;
use crate::resp;
use crate::scripts::{Arg, FastPath, SUFFIXES, write_key};

/// Maximum number of releases and acquisitions. A larger batch hardly saves server time per call, and a smaller one
/// lets the server start while further calls arrive.
const MAX_URGENT: usize = 12;
/// Maximum number of calls of all kinds. A larger batch would block the server for other clients.
const MAX_CALLS: usize = 32;

/// Fast-path calls for `many.lua`, and the callers that wait for the replies.
#[derive(Default)]
pub(crate) struct Batch {
    digest: String,
    /// In the order of the script: renewals, releases, acquisitions. Sessions never batch a call that has to run after
    /// one of a later kind.
    kinds: [Kind; 3],
    /// Number of keys and of arguments of all calls.
    counts: (usize, usize),
}

/// Encoded calls of one kind: keys by their order in the script, and arguments.
#[derive(Default)]
struct Kind {
    /// Keys that the script reads first.
    read: Vec<u8>,
    queues: Vec<u8>,
    /// Mutexes to acquire if they are free.
    mutexes: Vec<u8>,
    args: Vec<u8>,
    senders: Vec<ReplySender>,
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn is_full(&self) -> bool {
        let [renewals, ..] = &self.kinds;
        self.len() >= MAX_CALLS || self.len() - renewals.senders.len() >= MAX_URGENT
    }

    fn len(&self) -> usize {
        self.kinds.iter().map(|kind| kind.senders.len()).sum()
    }

    pub(crate) fn add(&mut self, call: &FastPath<'_>, mutex: &MutexName, digest: &str, sender: ReplySender) {
        if self.is_empty() {
            digest.clone_into(&mut self.digest);
        }
        let [holder, queue, fence, _] = SUFFIXES;
        let [renewals, releases, acquisitions] = &mut self.kinds;
        let (kind, keys, args) = match *call {
            FastPath::Renew(caller, lease) => {
                write_key(&mut renewals.read, mutex, holder);
                (renewals, 2, [Some(Arg::Caller(caller)), Some(Arg::Number(lease))])
            }
            FastPath::Release(caller, token) => {
                write_key(&mut releases.read, mutex, holder);
                write_key(&mut releases.queues, mutex, queue);
                (releases, 3, [Some(Arg::Hold(token, caller)), None])
            }
            FastPath::Acquire(caller, lease) => {
                write_key(&mut acquisitions.mutexes, mutex, holder);
                write_key(&mut acquisitions.queues, mutex, queue);
                (acquisitions, 3, [Some(Arg::Caller(caller)), Some(Arg::Number(lease))])
            }
        };
        write_key(&mut kind.read, mutex, fence);
        self.counts.0 += keys;
        for arg in args.into_iter().flatten() {
            arg.write(&mut kind.args);
            self.counts.1 += 1;
        }
        kind.senders.push(sender);
    }

    /// Writes the batch as one command and empties it. Returns the senders in the order of the replies.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) -> Vec<ReplySender> {
        let (keys, args) = std::mem::take(&mut self.counts);
        resp::write_array_header(out, 3 + keys + self.kinds.len() + args);
        resp::write_bulk(out, b"EVALSHA");
        resp::write_bulk(out, self.digest.as_bytes());
        resp::write_bulk_number(out, keys as u64);
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.read));
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.queues));
        self.kinds.iter_mut().for_each(|kind| out.append(&mut kind.mutexes));
        self.kinds.iter().for_each(|kind| resp::write_bulk_number(out, kind.senders.len() as u64));
        let mut senders = Vec::with_capacity(self.len());
        for kind in &mut self.kinds {
            out.append(&mut kind.args);
            senders.append(&mut kind.senders);
        }
        senders
    }
}
