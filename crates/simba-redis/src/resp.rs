//! The protocol of Redis, as far as it is needed: commands out, replies in.

use std::fmt;

/// No reply to what we ask is longer; a peer that announces more is not a Redis.
const MAX_BULK: usize = 64 << 20;
/// No reply to what we ask nests deeper.
const MAX_DEPTH: usize = 6;

/// What the server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Status(String),
    /// An error in the server's own words, which begin with its code.
    Error(String),
    Int(i64),
    Bulk(Vec<u8>),
    Nil,
    Array(Vec<Self>),
}

impl Reply {
    pub(crate) fn int(&self) -> Option<i64> {
        match self {
            Self::Int(int) => Some(*int),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
            Self::Status(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }
}

/// What came is no reply of a Redis.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("what came is no reply of a Redis server")
    }
}

impl std::error::Error for Malformed {}

/// The first reply in `bytes` and its length; `None` if it is not complete yet.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, Malformed> {
    let mut parser = Parser { bytes, at: 0 };
    Ok(parser.reply(0)?.map(|reply| (reply, parser.at)))
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn reply(&mut self, depth: usize) -> Result<Option<Reply>, Malformed> {
        let Some(kind) = self.bytes.get(self.at).copied() else { return Ok(None) };
        if !b"+-:$*".contains(&kind) || depth > MAX_DEPTH {
            return Err(Malformed);
        }
        let Some(line) = self.line()? else { return Ok(None) };
        let line = &self.bytes[line];
        match kind {
            b'+' => Ok(Some(Reply::Status(text(line)))),
            b'-' => Ok(Some(Reply::Error(text(line)))),
            b':' => number(line).map(|int| Some(Reply::Int(int))),
            b'$' => {
                let length = number(line)?;
                self.bulk(length)
            }
            _ => {
                let length = number(line)?;
                self.items(length, depth)
            }
        }
    }

    /// Where the rest of the line is, without its end; moves behind it.
    fn line(&mut self) -> Result<Option<std::ops::Range<usize>>, Malformed> {
        /// Longer than any line of a Redis: an error may repeat an argument.
        const MAX_LINE: usize = 64 << 10;
        let start = self.at + 1;
        let rest = &self.bytes[start..];
        match rest.iter().position(|byte| *byte == b'\n') {
            Some(end) if end > 0 && rest[end - 1] == b'\r' => {
                self.at = start + end + 1;
                Ok(Some(start..start + end - 1))
            }
            None if rest.len() <= MAX_LINE => Ok(None),
            _ => Err(Malformed),
        }
    }

    fn bulk(&mut self, length: i64) -> Result<Option<Reply>, Malformed> {
        let Some(length) = size(length)? else { return Ok(Some(Reply::Nil)) };
        let end = self.at + length;
        let Some(tail) = self.bytes.get(end..end + 2) else { return Ok(None) };
        if tail != b"\r\n" {
            return Err(Malformed);
        }
        let bulk = self.bytes[self.at..end].to_vec();
        self.at = end + 2;
        Ok(Some(Reply::Bulk(bulk)))
    }

    fn items(&mut self, length: i64, depth: usize) -> Result<Option<Reply>, Malformed> {
        let Some(length) = size(length)? else { return Ok(Some(Reply::Nil)) };
        // What is announced is not there yet: room for it comes as it comes.
        let mut items = Vec::with_capacity(length.min(64));
        for _ in 0..length {
            match self.reply(depth + 1)? {
                Some(item) => items.push(item),
                None => return Ok(None),
            }
        }
        Ok(Some(Reply::Array(items)))
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line).into_owned()
}

fn number(line: &[u8]) -> Result<i64, Malformed> {
    std::str::from_utf8(line).ok().and_then(|line| line.parse().ok()).ok_or(Malformed)
}

/// A length; -1 stands for nothing.
fn size(length: i64) -> Result<Option<usize>, Malformed> {
    match usize::try_from(length) {
        Ok(length) if length <= MAX_BULK => Ok(Some(length)),
        Err(_) if length == -1 => Ok(None),
        _ => Err(Malformed),
    }
}

// ===== commands =====

/// Begins a command of that many words.
pub(crate) fn begin(out: &mut Vec<u8>, words: usize) {
    head(out, b'*', words);
}

/// Adds one word.
pub(crate) fn word(out: &mut Vec<u8>, word: &[u8]) {
    words(out, &[word]);
}

/// Adds one word that is made of several pieces.
pub(crate) fn words(out: &mut Vec<u8>, pieces: &[&[u8]]) {
    head(out, b'$', pieces.iter().map(|piece| piece.len()).sum());
    pieces.iter().for_each(|piece| out.extend_from_slice(piece));
    out.extend_from_slice(b"\r\n");
}

/// Adds a number as a word.
pub(crate) fn number_word(out: &mut Vec<u8>, number: u64) {
    let mut digits = Digits::default();
    word(out, digits.of(number));
}

fn head(out: &mut Vec<u8>, kind: u8, length: usize) {
    let mut digits = Digits::default();
    out.push(kind);
    out.extend_from_slice(digits.of(length as u64));
    out.extend_from_slice(b"\r\n");
}

/// The digits of a number, without an allocation.
#[derive(Default)]
struct Digits([u8; 20]);

impl Digits {
    fn of(&mut self, mut number: u64) -> &[u8] {
        let mut at = self.0.len();
        loop {
            at -= 1;
            self.0[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return &self.0[at..];
            }
        }
    }
}

/// A whole command of plain words.
pub(crate) fn command(parts: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    begin(&mut out, parts.len());
    parts.iter().for_each(|part| word(&mut out, part.as_bytes()));
    out
}
