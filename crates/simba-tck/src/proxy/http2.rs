//! What an HTTP/2 client sends besides its requests.

/// The length of a frame header.
const HEADER: usize = 9;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;

/// Returns whether a chunk contains more than connection maintenance. Data that is not a frame, or the rest of a
/// frame that began earlier, counts as a request: at worst one request too many is counted.
pub(super) fn has_request(mut chunk: &[u8]) -> bool {
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
    fn connection_maintenance_is_no_request() {
        assert!(!has_request(&frame(PING, 8)));
        assert!(!has_request(&[frame(SETTINGS, 0), frame(WINDOW_UPDATE, 4), frame(PING, 8)].concat()));
        assert!(!has_request(&[]));
    }

    #[test]
    fn headers_and_data_are_a_request_in_every_position() {
        assert!(has_request(&frame(1, 20)));
        assert!(has_request(&[frame(PING, 8), frame(0, 5)].concat()));
        assert!(has_request(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
        assert!(has_request(&[1, 2, 3]), "the rest of a frame");
    }
}
