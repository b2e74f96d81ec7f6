//! Statements with their values spelt out, for where there is no time to prepare one.

use std::fmt::Write as _;

use mysql_async::Value;

/// The text with each `?` replaced by its value. Text is spelt by the codes of its bytes, so that no value can be
/// taken for a part of the statement, whatever the server thinks of quotes.
pub(crate) fn spell(text: &str, values: &[Value]) -> String {
    let mut spelt = String::with_capacity(text.len() + 32 * values.len());
    let mut values = values.iter();
    for part in text.split_inclusive('?') {
        match (part.strip_suffix('?'), values.len()) {
            (Some(before), 1..) => {
                spelt.push_str(before);
                values.by_ref().take(1).for_each(|value| push(&mut spelt, value));
            }
            _ => spelt.push_str(part),
        }
    }
    spelt
}

fn push(spelt: &mut String, value: &Value) {
    match value {
        Value::Bytes(bytes) if bytes.is_empty() => spelt.push_str("''"),
        Value::Bytes(bytes) => {
            spelt.push_str("_utf8mb4 0x");
            for byte in bytes {
                let _ = write!(spelt, "{byte:02x}");
            }
        }
        Value::Int(number) => spelt.push_str(&number.to_string()),
        Value::UInt(number) => spelt.push_str(&number.to_string()),
        // No statement of ours has any other.
        _ => spelt.push_str("NULL"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_spelt_by_its_bytes_and_numbers_as_they_are() {
        let values = ["a'?".into(), 7_u64.into(), "".into()];
        let spelt = spell("SET a = ?, b = ? WHERE c = ?", &values);
        assert_eq!(spelt, "SET a = _utf8mb4 0x61273f, b = 7 WHERE c = ''");
    }

    #[test]
    fn a_text_without_values_stays_as_it_is() {
        assert_eq!(spell("SELECT 1", &[]), "SELECT 1");
    }
}
