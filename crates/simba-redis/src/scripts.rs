//! The scripts that run in the server: constant, each key declared.

use std::sync::OnceLock;
use std::time::Duration;

use simba_core::{FencingToken, MutexName};

use crate::pipe::Haste;
use crate::resp::{self, Reply};

/// One of the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Contend,
    Release,
    Look,
    Evict,
    /// The usual cases of many calls.
    Many,
    /// A renewal, with keys that exist.
    Renew,
}

impl Script {
    pub(crate) const ALL: [Self; 6] =
        [Self::Contend, Self::Release, Self::Look, Self::Evict, Self::Many, Self::Renew];

    /// Returns the script without the constants of the handle.
    const fn text(self) -> &'static str {
        match self {
            Self::Contend => concat!(
                include_str!("scripts/times.lua"),
                include_str!("scripts/take.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/contend.lua")
            ),
            Self::Release => concat!(
                include_str!("scripts/times.lua"),
                include_str!("scripts/free.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/release.lua")
            ),
            Self::Look => concat!(
                include_str!("scripts/times.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/look.lua")
            ),
            Self::Evict => concat!(
                include_str!("scripts/times.lua"),
                include_str!("scripts/wake.lua"),
                include_str!("scripts/evict.lua")
            ),
            Self::Renew => include_str!("scripts/renew.lua"),
            Self::Many => concat!(include_str!("scripts/times.lua"), include_str!("scripts/many.lua")),
        }
    }
}

/// How late the end of a fence may be set, so that not every use of a mutex has to set it. The scripts count on it.
const FENCE_SLACK: Duration = Duration::from_secs(1000);

/// The scripts of one handle, in the order of [`Script::ALL`].
pub(crate) struct Scripts {
    sources: [String; Script::ALL.len()],
    /// What a server calls them: the same on every one, known after the first connection.
    digests: OnceLock<[String; Script::ALL.len()]>,
}

impl Scripts {
    /// Returns scripts that keep a fence for so long after the last use of its mutex.
    pub(crate) fn new(fence_retention: Duration) -> Self {
        let kept = (fence_retention + FENCE_SLACK).as_millis();
        // As text: the server turns a number into text slowly.
        let source = |script: Script| format!("local FENCE_KEPT = '{kept}'\n{}", script.text());
        Self { sources: Script::ALL.map(source), digests: OnceLock::new() }
    }

    pub(crate) fn source(&self, script: Script) -> &str {
        &self.sources[script as usize]
    }

    pub(crate) fn digest(&self, script: Script) -> Option<&str> {
        self.digests.get().map(|digests| digests[script as usize].as_str())
    }

    /// Returns the commands that load the scripts into a server.
    pub(crate) fn load(&self) -> [[&str; 3]; Script::ALL.len()] {
        Script::ALL.map(|script| ["SCRIPT", "LOAD", self.source(script)])
    }

    /// Learns the digests from the replies to [`load`](Self::load); `None` if they are none.
    pub(crate) fn loaded(&self, replies: &[Reply]) -> Option<()> {
        let digests: Option<Vec<String>> = replies.iter().map(|reply| reply.text().map(Into::into)).collect();
        let digests = digests?.try_into().ok()?;
        self.digests.get_or_init(|| digests);
        Some(())
    }
}

/// An argument of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    Text(&'a str),
    Number(u64),
    Caller(Caller<'a>),
    /// What the caller wants, its place in the queue, and for how many milliseconds it has it: a half more if it
    /// listens.
    Place {
        intent: &'a str,
        place: u64,
        lasts: u64,
        listens: bool,
    },
}

/// What the fence says of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller<'a> {
    /// Tells it from every other under the same id.
    pub(crate) nonce: u64,
    /// In milliseconds.
    pub(crate) transition: u64,
    pub(crate) contender: &'a str,
}

/// One call of a script on one mutex.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invocation<'a> {
    pub(crate) script: Script,
    pub(crate) mutex: &'a MutexName,
    pub(crate) args: &'a [Arg<'a>],
    pub(crate) haste: Haste,
    /// What it most likely comes to: such calls may share one script.
    pub(crate) usual: Option<Usual<'a>>,
}

/// What a call most likely comes to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Usual<'a> {
    /// It is still the caller's, and goes on for so many milliseconds.
    Renew(Caller<'a>, u64),
    /// Nobody has it and nobody waits for it, so that it is the caller's for so many milliseconds.
    First(Caller<'a>, u64),
    /// It is the caller's under this token, and nobody waits for it.
    Leave(Caller<'a>, FencingToken),
}

/// The keys of calls that share a script, as words of a command.
#[derive(Default)]
pub(crate) struct Keys {
    /// What is read first.
    pub(crate) read: Vec<u8>,
    /// Who waits.
    pub(crate) waiting: Vec<u8>,
    /// What is taken if it is free.
    pub(crate) taken: Vec<u8>,
}

/// What a mutex's keys end with, in the order of the scripts.
const SUFFIXES: [&[u8]; 4] = [b"}", b"}:contender", b"}:fence", b"}:alive"];

impl<'a> Invocation<'a> {
    /// A call in haste, of which nothing is known.
    pub(crate) fn new(script: Script, mutex: &'a MutexName, args: &'a [Arg<'a>]) -> Self {
        Self { script, mutex, args, haste: Haste::Now, usual: None }
    }

    /// Writes the call by the script's digest, or with its source where no digest is known.
    pub(crate) fn write(&self, out: &mut Vec<u8>, scripts: &Scripts) {
        match scripts.digest(self.script) {
            Some(digest) => self.write_as(out, b"EVALSHA", digest),
            None => self.write_source(out, scripts),
        }
    }

    /// Writes the call with the script's source, for a server that forgot it.
    pub(crate) fn write_source(&self, out: &mut Vec<u8>, scripts: &Scripts) {
        self.write_as(out, b"EVAL", scripts.source(self.script));
    }

    fn write_as(&self, out: &mut Vec<u8>, command: &[u8], script: &str) {
        let [mutex, _, fence, _] = SUFFIXES;
        let suffixes = if self.script == Script::Renew { &[mutex, fence][..] } else { &SUFFIXES };
        resp::begin(out, 3 + suffixes.len() + self.args.len());
        resp::word(out, command);
        resp::word(out, script.as_bytes());
        resp::number_word(out, suffixes.len() as u64);
        suffixes.iter().for_each(|suffix| write_key(out, self.mutex, suffix));
        self.args.iter().for_each(|arg| arg.write(out));
    }
}

fn write_key(out: &mut Vec<u8>, mutex: &MutexName, suffix: &[u8]) {
    resp::words(out, &[b"simba:{", mutex.as_str().as_bytes(), suffix]);
}

impl Usual<'_> {
    /// Its place among the kinds that the script goes through.
    pub(crate) fn kind(&self) -> usize {
        match self {
            Self::Renew(..) => 0,
            Self::Leave(..) => 1,
            Self::First(..) => 2,
        }
    }

    /// Writes its keys, by what the script does with them; how many there are.
    pub(crate) fn write_keys(&self, mutex: &MutexName, keys: &mut Keys) -> usize {
        let [holder, queue, fence, _] = SUFFIXES;
        let first = matches!(self, Self::First(..));
        write_key(if first { &mut keys.taken } else { &mut keys.read }, mutex, holder);
        write_key(&mut keys.read, mutex, fence);
        if matches!(self, Self::Renew(..)) {
            return 2;
        }
        write_key(&mut keys.waiting, mutex, queue);
        3
    }

    /// Writes its arguments; how many there are.
    pub(crate) fn write_args(&self, out: &mut Vec<u8>) -> usize {
        match *self {
            Self::Renew(caller, lease) | Self::First(caller, lease) => {
                caller.write_after(out, b"");
                resp::number_word(out, lease);
                2
            }
            Self::Leave(caller, token) => {
                let mut before = *b"0000000000000000 ";
                before[..16].copy_from_slice(&digits::<16>(token.get(), 10));
                caller.write_after(out, &before);
                1
            }
        }
    }
}

impl Caller<'_> {
    /// Writes it as one word, after what comes before.
    fn write_after(self, out: &mut Vec<u8>, before: &[u8]) {
        // As long for every caller: the scripts count characters.
        let (nonce, transition) = (digits::<16>(self.nonce, 16), digits::<11>(self.transition, 10));
        resp::words(out, &[before, &nonce, b" ", &transition, b" ", self.contender.as_bytes()]);
    }
}

impl Arg<'_> {
    fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Text(text) => resp::word(out, text.as_bytes()),
            Self::Number(number) => resp::number_word(out, number),
            Self::Caller(caller) => caller.write_after(out, b""),
            Self::Place { intent, place, lasts, listens } => {
                let half = if listens { ".5" } else { "" };
                resp::word(out, format!("{intent} {place} {lasts}{half}").as_bytes());
            }
        }
    }
}

/// The last digits of a number, as many as asked for.
fn digits<const COUNT: usize>(mut number: u64, base: u64) -> [u8; COUNT] {
    let mut digits = [b'0'; COUNT];
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(number % base) as usize];
        number /= base;
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
            Arg::Caller(Caller { nonce: 0xab, transition: 6, contender: "a@b" }),
            Arg::Place { intent: "f", place: 0, lasts: 9, listens: false },
            Arg::Place { intent: "Q", place: 8, lasts: 9, listens: true },
        ];
        let call = Invocation::new(Script::Release, &mutex, &args);
        let scripts = Scripts::new(Duration::from_secs(60));
        scripts.loaded(&["0", "1", "2", "3", "4", "5"].map(|digest| Reply::Status(digest.into()))).unwrap();
        let mut out = Vec::new();
        call.write(&mut out, &scripts);
        let text = String::from_utf8(out).unwrap();
        let words: Vec<_> = text.split("\r\n").skip(2).step_by(2).collect();
        let wanted = [
            "EVALSHA",
            "1",
            "4",
            "simba:{m}",
            "simba:{m}:contender",
            "simba:{m}:fence",
            "simba:{m}:alive",
            "a@b",
            "7",
            "00000000000000ab 00000000006 a@b",
            "f 0 9",
            "Q 8 9.5",
        ];
        assert_eq!(words, wanted);
    }
}
