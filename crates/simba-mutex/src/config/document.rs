//! Parses TOML and YAML into the same keys and values, each with its line.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};
use yaml_rust2::parser::{Event, Parser};

/// A value of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// A string, a number or a boolean, as text.
    Value(String),
    Table(Table),
    /// An unsupported value, such as a list.
    Other,
}

/// Keys in order, each with its line.
pub(super) type Table = BTreeMap<String, (usize, Node)>;

/// An error in a document, with its line. It contains no value, since that may be a secret.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ParseError {
    pub(super) line: usize,
    pub(super) message: String,
}

pub(super) fn from_toml(text: &str) -> Result<Table, ParseError> {
    let document = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        ParseError { line: line_of(text, at), message: "invalid TOML".into() }
    })?;
    Ok(table(text, document.get_ref()))
}

fn table(text: &str, found: &DeTable<'_>) -> Table {
    let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let key: &std::borrow::Cow<'_, str> = key.get_ref();
        (key.to_string(), (line_of(text, value.span().start), node(text, value.get_ref())))
    };
    found.iter().map(entry).collect()
}

fn node(text: &str, value: &DeValue<'_>) -> Node {
    match value {
        DeValue::String(value) => Node::Value(value.to_string()),
        DeValue::Integer(value) => Node::Value(value.to_string()),
        DeValue::Boolean(value) => Node::Value(value.to_string()),
        DeValue::Table(found) => Node::Table(table(text, found)),
        _ => Node::Other,
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

pub(super) fn from_yaml(text: &str) -> Result<Table, ParseError> {
    let mut events = Events { parser: Parser::new_from_str(text) };
    loop {
        match events.next()? {
            (Event::MappingStart(..), _) => return events.table(0),
            // The document has only comments.
            (Event::StreamEnd, _) => return Ok(Table::new()),
            (Event::Scalar(value, ..), _) if value.is_empty() || value == "~" => {}
            (Event::StreamStart | Event::DocumentStart | Event::DocumentEnd | Event::Nothing, _) => {}
            (_, line) => {
                return Err(ParseError { line, message: "keys with values are expected here".into() });
            }
        }
    }
}

/// The limit of nested tables.
const MAX_DEPTH: usize = 8;

struct Events<'a> {
    parser: Parser<std::str::Chars<'a>>,
}

impl Events<'_> {
    fn next(&mut self) -> Result<(Event, usize), ParseError> {
        match self.parser.next_token() {
            Ok((event, marker)) => Ok((event, marker.line())),
            Err(error) => Err(ParseError { line: error.marker().line(), message: "invalid YAML".into() }),
        }
    }

    fn table(&mut self, depth: usize) -> Result<Table, ParseError> {
        let mut found = Table::new();
        loop {
            match self.next()? {
                (Event::MappingEnd, _) => return Ok(found),
                (Event::Scalar(key, ..), line) => {
                    let node = self.node(depth)?;
                    if found.insert(key.clone(), (line, node)).is_some() {
                        return Err(ParseError { line, message: format!("the key `{key}` is repeated") });
                    }
                }
                (_, line) => return Err(ParseError { line, message: "a key is expected here".into() }),
            }
        }
    }

    fn node(&mut self, depth: usize) -> Result<Node, ParseError> {
        match self.next()? {
            (Event::Scalar(value, ..), _) => Ok(Node::Value(value)),
            (Event::MappingStart(..), _) if depth < MAX_DEPTH => Ok(Node::Table(self.table(depth + 1)?)),
            (Event::SequenceStart(..), _) => {
                let mut open = 1;
                while open > 0 {
                    match self.next()?.0 {
                        Event::SequenceStart(..) | Event::MappingStart(..) => open += 1,
                        Event::SequenceEnd | Event::MappingEnd => open -= 1,
                        _ => {}
                    }
                }
                Ok(Node::Other)
            }
            (_, line) => Err(ParseError { line, message: "a value is expected here".into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Node {
        Node::Value(text.to_owned())
    }

    #[test]
    fn toml_and_yaml_give_the_same_tables() {
        let toml = from_toml("ttl = \"10s\"\nenabled = true\n[redis]\nttl = \"5s\"\nlist = [1]\n").unwrap();
        let yaml = from_yaml("ttl: 10s\nenabled: true\nredis:\n  ttl: 5s\n  list: [1, {a: 2}]\n").unwrap();
        for found in [&toml, &yaml] {
            assert_eq!(found["ttl"], (1, value("10s")));
            assert_eq!(found["enabled"], (2, value("true")));
            let Node::Table(redis) = &found["redis"].1 else { panic!("{found:?}") };
            assert_eq!((&redis["ttl"], &redis["list"].1), (&(4, value("5s")), &Node::Other));
        }
    }

    #[test]
    fn parse_error_has_the_line_and_no_value() {
        for (error, line) in [
            (from_toml("a = 1\npassword = hunter2\n").unwrap_err(), 2),
            (from_yaml("a: 1\npassword: [hunter2\n").unwrap_err(), 3),
            (from_yaml("a: 1\na: 2\n").unwrap_err(), 2),
            (from_yaml("- hunter2\n").unwrap_err(), 1),
        ] {
            assert_eq!(error.line, line, "{error:?}");
            assert!(!error.message.contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn empty_document_has_no_keys() {
        for text in ["", "# a comment\n", "---\n", "~"] {
            assert_eq!(from_yaml(text).unwrap(), Table::new(), "{text:?}");
        }
        assert_eq!(from_toml("# a comment\n").unwrap(), Table::new());
    }
}
