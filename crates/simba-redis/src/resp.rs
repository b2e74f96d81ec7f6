//! RESP2, the protocol of Redis: encodes commands and parses replies.

use std::fmt;

/// Maximum length of a string or array. No reply to our commands is longer, so the peer is not a Redis server.
const MAX_BULK: usize = 64 << 20;
/// Maximum nesting of arrays. No reply to our commands nests deeper.
const MAX_DEPTH: usize = 6;

/// A reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Status(String),
    /// The text of an error, which begins with its code.
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

/// The bytes are not a reply of a Redis server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes are not a reply of a Redis server")
    }
}

impl std::error::Error for Malformed {}

/// Returns the first reply in `bytes` and its length, or `None` if it is incomplete.
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

    /// Returns the range of the current line without its type byte and its end, and moves to the next line.
    fn line(&mut self) -> Result<Option<std::ops::Range<usize>>, Malformed> {
        /// Longer than any line of a Redis server. An error may repeat an argument.
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
        // The announced length is not trusted: memory is allocated as items arrive.
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

/// Converts a length. -1 stands for nil.
fn size(length: i64) -> Result<Option<usize>, Malformed> {
    match usize::try_from(length) {
        Ok(length) if length <= MAX_BULK => Ok(Some(length)),
        Err(_) if length == -1 => Ok(None),
        _ => Err(Malformed),
    }
}

// ===== commands =====

/// Starts a command with this number of arguments, including its name.
pub(crate) fn write_array_header(out: &mut Vec<u8>, args: usize) {
    write_header(out, b'*', args);
}

/// Writes one argument.
pub(crate) fn write_bulk(out: &mut Vec<u8>, arg: &[u8]) {
    write_bulk_parts(out, &[arg]);
}

/// Writes one argument that consists of several parts.
pub(crate) fn write_bulk_parts(out: &mut Vec<u8>, parts: &[&[u8]]) {
    write_header(out, b'$', parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out.extend_from_slice(b"\r\n");
}

/// Writes a number as one argument.
pub(crate) fn write_bulk_number(out: &mut Vec<u8>, number: u64) {
    let mut digits = Digits::default();
    write_bulk(out, digits.of(number));
}

fn write_header(out: &mut Vec<u8>, kind: u8, length: usize) {
    let mut digits = Digits::default();
    out.push(kind);
    out.extend_from_slice(digits.of(length as u64));
    out.extend_from_slice(b"\r\n");
}

/// Decimal digits of a number, without an allocation.
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

/// Writes a command.
pub(crate) fn write_command(out: &mut Vec<u8>, parts: &[&str]) {
    write_array_header(out, parts.len());
    parts.iter().for_each(|part| write_bulk(out, part.as_bytes()));
}

/// Returns an encoded command.
pub(crate) fn command(parts: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    write_command(&mut out, parts);
    out
}
