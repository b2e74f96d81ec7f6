//! A file as keys and values, each with its line: TOML and YAML look the same from here.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};
use yaml_rust2::parser::{Event, Parser};

/// A value, or what stands where one should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Text, a number or a truth, as it is written.
    Value(String),
    Table(Table),
    /// Nothing that we take, such as a list.
    Other,
}

/// Keys in order, each with the line that it stands on.
pub(super) type Table = BTreeMap<String, (usize, Node)>;

/// What is wrong with a text, and on which line. No value is repeated: it may be a secret.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) line: usize,
    pub(super) message: String,
}

pub(super) fn from_toml(text: &str) -> Result<Table, Complaint> {
    let document = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        Complaint { line: line_of(text, at), message: "this is no TOML".into() }
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

pub(super) fn from_yaml(text: &str) -> Result<Table, Complaint> {
    let mut events = Events { parser: Parser::new_from_str(text) };
    loop {
        match events.next()? {
            (Event::MappingStart(..), _) => return events.table(0),
            // Nothing but comments.
            (Event::StreamEnd, _) => return Ok(Table::new()),
            (Event::Scalar(value, ..), _) if value.is_empty() || value == "~" => {}
            (Event::StreamStart | Event::DocumentStart | Event::DocumentEnd | Event::Nothing, _) => {}
            (_, line) => {
                return Err(Complaint { line, message: "keys with values are expected here".into() });
            }
        }
    }
}

/// Tables within tables that nobody writes by hand.
const DEEPEST: usize = 8;

struct Events<'a> {
    parser: Parser<std::str::Chars<'a>>,
}

impl Events<'_> {
    fn next(&mut self) -> Result<(Event, usize), Complaint> {
        match self.parser.next_token() {
            Ok((event, marker)) => Ok((event, marker.line())),
            Err(error) => Err(Complaint { line: error.marker().line(), message: "this is no YAML".into() }),
        }
    }

    fn table(&mut self, depth: usize) -> Result<Table, Complaint> {
        let mut found = Table::new();
        loop {
            match self.next()? {
                (Event::MappingEnd, _) => return Ok(found),
                (Event::Scalar(key, ..), line) => {
                    let node = self.node(depth)?;
                    if found.insert(key.clone(), (line, node)).is_some() {
                        return Err(Complaint { line, message: format!("`{key}` is here a second time") });
                    }
                }
                (_, line) => return Err(Complaint { line, message: "a key is expected here".into() }),
            }
        }
    }

    fn node(&mut self, depth: usize) -> Result<Node, Complaint> {
        match self.next()? {
            (Event::Scalar(value, ..), _) => Ok(Node::Value(value)),
            (Event::MappingStart(..), _) if depth < DEEPEST => Ok(Node::Table(self.table(depth + 1)?)),
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
            (_, line) => Err(Complaint { line, message: "a value is expected here".into() }),
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
    fn both_forms_say_the_same() {
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
    fn what_is_wrong_is_told_by_its_line_and_not_repeated() {
        for (complaint, line) in [
            (from_toml("a = 1\npassword = hunter2\n").unwrap_err(), 2),
            (from_yaml("a: 1\npassword: [hunter2\n").unwrap_err(), 3),
            (from_yaml("a: 1\na: 2\n").unwrap_err(), 2),
            (from_yaml("- hunter2\n").unwrap_err(), 1),
        ] {
            assert_eq!(complaint.line, line, "{complaint:?}");
            assert!(!complaint.message.contains("hunter2"), "{complaint:?}");
        }
    }

    #[test]
    fn an_empty_file_says_nothing() {
        for text in ["", "# a remark\n", "---\n", "~"] {
            assert_eq!(from_yaml(text).unwrap(), Table::new(), "{text:?}");
        }
        assert_eq!(from_toml("# a remark\n").unwrap(), Table::new());
    }
}
