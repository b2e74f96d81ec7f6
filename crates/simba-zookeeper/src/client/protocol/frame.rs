//! Splits a stream of bytes into messages.

use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::jute::Malformed;

/// The longest message that is accepted. A list of a hundred thousand contenders is shorter.
const MAX: usize = 16 << 20;
/// The size of one read. The buffer grows with received bytes, never with an announced length.
const STEP: usize = 16 << 10;

/// The received bytes that are not consumed yet.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    taken: usize,
}

impl Frames {
    /// Reads the available bytes. Returns false at the end of the stream.
    ///
    /// # Cancel safety
    ///
    /// A dropped call has read nothing.
    pub(crate) async fn fill(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin + Send),
    ) -> std::io::Result<bool> {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.reserve(STEP);
        Ok(stream.read_buf(&mut self.bytes).await? > 0)
    }

    /// Returns the next complete message.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, Malformed> {
        let rest = &self.bytes[self.taken..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = usize::try_from(i32::from_be_bytes(*length)).ok().filter(|length| *length <= MAX);
        let length = length.ok_or(Malformed("a message has an impossible length"))?;
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        self.taken += 4 + length;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn messages_are_complete_even_if_reads_split_them() {
        let mut stream: &[u8] = &[0, 0, 0, 2, 7, 8, 0, 0, 0, 0, 0, 0, 0, 1];
        let mut frames = Frames::default();
        assert!(frames.fill(&mut stream).await.unwrap());
        assert_eq!(frames.next().unwrap(), Some(&[7, 8][..]));
        assert_eq!(frames.next().unwrap(), Some(&[][..]));
        assert_eq!(frames.next().unwrap(), None);
        let mut stream: &[u8] = &[9];
        frames.fill(&mut stream).await.unwrap();
        assert_eq!(frames.next().unwrap(), Some(&[9][..]));
    }

    #[tokio::test]
    async fn an_impossible_length_is_rejected_before_memory_is_allocated() {
        for mut stream in [&[0x7f, 0xff, 0xff, 0xff][..], b"HTTP/1.1 400"] {
            let mut frames = Frames::default();
            frames.fill(&mut stream).await.unwrap();
            assert!(frames.next().is_err());
        }
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut frames = Frames { bytes, taken: 0 };
            while let Ok(Some(_)) = frames.next() {}
        }
    }
}
