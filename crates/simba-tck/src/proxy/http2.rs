//! What a client of HTTP/2 says besides its requests.

/// The length of what every frame begins with.
const HEADER: usize = 9;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;

/// Whether there is more in a chunk than what keeps a connection going. What is no frame, or the rest of one that began
/// earlier, counts as a request: at worst one more is counted.
pub(super) fn asks(mut chunk: &[u8]) -> bool {
    while let Some((header, rest)) = chunk.split_at_checked(HEADER) {
        if !matches!(header[3], SETTINGS | PING | WINDOW_UPDATE) {
            return true;
        }
        let length = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
        let Some(rest) = rest.get(length..) else { return false };
        chunk = rest;
    }
    !chunk.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, 0, 0, 0, 0, 1];
        frame.extend(vec![7; length.into()]);
        frame
    }

    #[test]
    fn what_keeps_a_connection_going_is_no_request() {
        assert!(!asks(&frame(PING, 8)));
        assert!(!asks(&[frame(SETTINGS, 0), frame(WINDOW_UPDATE, 4), frame(PING, 8)].concat()));
        assert!(!asks(&[]));
    }

    #[test]
    fn headers_and_data_are_one_wherever_they_stand() {
        assert!(asks(&frame(1, 20)));
        assert!(asks(&[frame(PING, 8), frame(0, 5)].concat()));
        assert!(asks(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
        assert!(asks(&[1, 2, 3]), "the rest of something");
    }
}
