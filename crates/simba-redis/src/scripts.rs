//! The scripts that run in the server: constant, each key declared.

use simba_core::MutexName;

use crate::pipe::Haste;
use crate::resp;

/// One of the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Contend,
    Release,
    Look,
    Evict,
}

impl Script {
    pub(crate) const ALL: [Self; 4] = [Self::Contend, Self::Release, Self::Look, Self::Evict];

    pub(crate) const fn source(self) -> &'static str {
        match self {
            Self::Contend => concat!(
                include_str!("scripts/take.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/contend.lua")
            ),
            Self::Release => concat!(
                include_str!("scripts/free.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/release.lua")
            ),
            Self::Look => concat!(include_str!("scripts/wake.lua"), include_str!("scripts/look.lua")),
            Self::Evict => concat!(include_str!("scripts/wake.lua"), include_str!("scripts/evict.lua")),
        }
    }
}

/// What the server calls the scripts, in the order of [`Script::ALL`].
pub(crate) type Digests = [String; Script::ALL.len()];

/// An argument of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    Text(&'a str),
    Number(u64),
    /// What the fence says of a session: its nonce, its transition in milliseconds, its contender.
    Fence(u64, u64, &'a str),
    /// What the caller wants, its place in the queue, and for how many milliseconds it has it: a half more if it
    /// listens.
    Place {
        intent: &'a str,
        place: u64,
        lasts: u64,
        listens: bool,
    },
}

/// One call of a script on one mutex.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invocation<'a> {
    pub(crate) script: Script,
    pub(crate) mutex: &'a MutexName,
    pub(crate) args: &'a [Arg<'a>],
    pub(crate) haste: Haste,
}

/// What a mutex's keys end with, in the order of the scripts.
const SUFFIXES: [&[u8]; 5] = [b"}", b"}:contender", b"}:fence", b"}:alive", b"}:turn"];

impl Invocation<'_> {
    /// Writes the call by the script's digest, or with its source if the server forgot it.
    pub(crate) fn write(&self, out: &mut Vec<u8>, digests: Option<&Digests>) {
        resp::begin(out, 3 + SUFFIXES.len() + self.args.len());
        match digests {
            Some(digests) => {
                resp::word(out, b"EVALSHA");
                resp::word(out, digests[self.script as usize].as_bytes());
            }
            None => {
                resp::word(out, b"EVAL");
                resp::word(out, self.script.source().as_bytes());
            }
        }
        resp::number_word(out, SUFFIXES.len() as u64);
        for suffix in SUFFIXES {
            resp::words(out, &[b"simba:{", self.mutex.as_str().as_bytes(), suffix]);
        }
        self.args.iter().for_each(|arg| arg.write(out));
    }
}

impl Arg<'_> {
    fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Text(text) => resp::word(out, text.as_bytes()),
            Self::Number(number) => resp::number_word(out, number),
            Self::Fence(nonce, transition, contender) => {
                let transition = transition.to_string();
                let pieces = [&hex(nonce)[..], b" ", transition.as_bytes(), b" ", contender.as_bytes()];
                resp::words(out, &pieces);
            }
            Self::Place { intent, place, lasts, listens } => {
                let half = if listens { ".5" } else { "" };
                resp::word(out, format!("{intent} {place} {lasts}{half}").as_bytes());
            }
        }
    }
}

fn hex(number: u64) -> [u8; 16] {
    let mut digits = [0; 16];
    for (at, digit) in digits.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 15];
    }
    digits
}

/// The key of the mutex itself, which is the channel of its wins too.
pub(crate) fn key(mutex: &MutexName) -> String {
    format!("simba:{{{mutex}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_declares_every_key_and_holds_its_arguments() {
        let mutex = MutexName::new("m").unwrap();
        let args = [
            Arg::Text("a@b"),
            Arg::Number(7),
            Arg::Fence(0xab, 6, "a@b"),
            Arg::Place { intent: "f", place: 0, lasts: 9, listens: false },
            Arg::Place { intent: "Q", place: 8, lasts: 9, listens: true },
        ];
        let call = Invocation { script: Script::Release, mutex: &mutex, args: &args, haste: Haste::Now };
        let digests = ["0", "1", "2", "3"].map(String::from);
        let mut out = Vec::new();
        call.write(&mut out, Some(&digests));
        let text = String::from_utf8(out).unwrap();
        let words: Vec<_> = text.split("\r\n").skip(2).step_by(2).collect();
        let wanted = [
            "EVALSHA",
            "1",
            "5",
            "simba:{m}",
            "simba:{m}:contender",
            "simba:{m}:fence",
            "simba:{m}:alive",
            "simba:{m}:turn",
            "a@b",
            "7",
            "00000000000000ab 6 a@b",
            "f 0 9",
            "Q 8 9.5",
        ];
        assert_eq!(words, wanted);
    }
}
