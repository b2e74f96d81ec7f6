//! Jute, the encoding of messages: big-endian numbers, and length-prefixed buffers, texts and lists.

use std::fmt;

use super::names::Names;

/// Builds a message.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn int(&mut self, value: i32) -> &mut Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn long(&mut self, value: i64) -> &mut Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn bool(&mut self, value: bool) -> &mut Self {
        self.bytes.push(u8::from(value));
        self
    }

    pub(crate) fn buffer(&mut self, value: &[u8]) -> &mut Self {
        self.int(length(value.len()));
        self.bytes.extend_from_slice(value);
        self
    }

    pub(crate) fn text(&mut self, value: &str) -> &mut Self {
        self.buffer(value.as_bytes())
    }

    /// Writes one message with its length in front.
    pub(crate) fn frame(&mut self, message: impl FnOnce(&mut Self)) {
        let begin = self.bytes.len();
        self.int(0);
        message(self);
        let length = length(self.bytes.len() - begin - 4);
        self.bytes[begin..begin + 4].copy_from_slice(&length.to_be_bytes());
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Removes the first `count` bytes, which were sent.
    pub(crate) fn sent(&mut self, count: usize) {
        self.bytes.drain(..count);
    }
}

/// Converts a length. A path is at most a kilobyte and an id is shorter, so no length reaches the limit.
fn length(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

/// The reason for which a message is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// Parses a message. No input causes a panic, or an allocation larger than the input.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(Malformed("a message is truncated"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| Malformed("a message is truncated"))
    }

    pub(crate) fn int(&mut self) -> Result<i32, Malformed> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    pub(crate) fn long(&mut self) -> Result<i64, Malformed> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    pub(crate) fn bool(&mut self) -> Result<bool, Malformed> {
        Ok(self.array::<1>()? != [0])
    }

    /// Reads a buffer. A length of -1 denotes null, which is returned as an empty slice.
    pub(crate) fn buffer(&mut self) -> Result<&'a [u8], Malformed> {
        match usize::try_from(self.int()?) {
            Ok(length) => self.take(length),
            Err(_) => Ok(&[]),
        }
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.buffer()?).map_err(|_| Malformed("a text is not UTF-8"))
    }

    /// Reads a list of texts. Each has at least four bytes, which bounds the count by the rest of the message.
    pub(crate) fn texts(&mut self) -> Result<Names, Malformed> {
        let count = usize::try_from(self.int()?).unwrap_or(0);
        if count > self.rest.len() / 4 {
            return Err(Malformed("a list is longer than its message"));
        }
        let mut names = Names::with_capacity(self.rest.len() - 4 * count, count);
        for _ in 0..count {
            names.push(self.text()?);
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn written_values_are_read_back() {
        let mut writer = Writer::default();
        writer.frame(|w| {
            w.int(-7).long(1 << 40).bool(true).text("simba").buffer(&[1, 2]);
            w.int(2).text("a").text("b");
        });
        let mut reader = Reader::new(writer.bytes());
        assert_eq!(usize::try_from(reader.int().unwrap()).unwrap(), writer.bytes().len() - 4);
        assert_eq!((reader.int(), reader.long(), reader.bool()), (Ok(-7), Ok(1 << 40), Ok(true)));
        assert_eq!((reader.text(), reader.buffer()), (Ok("simba"), Ok(&[1, 2][..])));
        assert_eq!(reader.texts().unwrap().iter().collect::<Vec<_>>(), ["a", "b"]);
        assert!(reader.bool().is_err(), "nothing is left");
    }

    #[test]
    fn a_count_larger_than_the_message_is_rejected() {
        assert!(Reader::new(&i32::MAX.to_be_bytes()).texts().is_err());
        assert!(Reader::new(&i32::MAX.to_be_bytes()).buffer().is_err());
        assert_eq!(Reader::new(&(-1i32).to_be_bytes()).buffer(), Ok(&[][..]));
    }

    proptest! {
        #[test]
        fn no_message_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Reader::new(&bytes).texts();
            let mut reader = Reader::new(&bytes);
            while reader.text().is_ok() && reader.long().is_ok() && reader.bool().is_ok() {}
        }
    }
}
