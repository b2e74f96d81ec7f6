//! Percent-encoding and decoding. No error contains the text, which may be a password.

use crate::error::{Error, Result};

/// Percent-decodes one part of a URL; `part` names it in an error.
pub(super) fn decode(part: &str, text: &str) -> Result<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let (byte, tail) = escape(piece.as_bytes()).ok_or_else(|| {
            Error::invalid(format!(
                "the {part} of the URL has a `%` without two hexadecimal digits: write a `%` itself as %25"
            ))
        })?;
        bytes.push(byte);
        bytes.extend_from_slice(tail);
    }
    check(part, bytes)
}

fn escape(piece: &[u8]) -> Option<(u8, &[u8])> {
    let [high, low, tail @ ..] = piece else {
        return None;
    };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?;
    Some((byte, tail))
}

fn check(part: &str, bytes: Vec<u8>) -> Result<String> {
    // The cause is dropped because it contains the bytes.
    let text = String::from_utf8(bytes).map_err(|_| {
        Error::invalid(format!("the percent escapes in the {part} of the URL must make UTF-8, they do not"))
    })?;
    // An escaped NUL would truncate a file name, an escaped line feed would forge a line in a log.
    if text.contains(char::is_control) {
        return Err(Error::invalid(format!(
            "the {part} of the URL has an escaped control character: remove it"
        )));
    }
    Ok(text)
}

/// Percent-encodes all characters except letters, digits, `-._~` and those in `keep`.
pub(super) fn encode(text: &str, keep: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match char::from(byte) {
            c if c.is_ascii_alphanumeric() || "-._~".contains(c) || keep.contains(c) => out.push(c),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
