//! Tests of the codec, in their own file because the integration tests include `resp.rs`.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::resp::{
    Malformed, Reply, command, parse, write_array_header, write_bulk_number, write_bulk_parts,
};

fn all(bytes: &[u8]) -> Reply {
    let (reply, length) = parse(bytes).unwrap().unwrap();
    assert_eq!(length, bytes.len());
    reply
}

#[test]
fn every_kind_of_reply_is_parsed() {
    assert_eq!(all(b"+OK\r\n"), Reply::Status("OK".into()));
    assert_eq!(all(b"-ERR no\r\n"), Reply::Error("ERR no".into()));
    assert_eq!(all(b":-7\r\n"), Reply::Int(-7));
    assert_eq!(all(b"$3\r\na\r\n\r\n"), Reply::Bulk(b"a\r\n".to_vec()));
    assert_eq!(all(b"$-1\r\n"), Reply::Nil);
    assert_eq!(all(b"*-1\r\n"), Reply::Nil);
    let nested = Reply::Array(vec![Reply::Int(1), Reply::Array(vec![Reply::Bulk(vec![])])]);
    assert_eq!(all(b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n"), nested);
}

#[test]
fn incomplete_reply_is_not_parsed() {
    let bytes = b"*2\r\n$5\r\nhello\r\n:12\r\n+next\r\n";
    let whole = bytes.len() - b"+next\r\n".len();
    for end in 0..whole {
        assert_eq!(parse(&bytes[..end]), Ok(None), "{end} bytes are not a complete reply");
    }
    assert_eq!(parse(bytes).unwrap().unwrap().1, whole);
}

#[test]
fn malformed_replies_are_errors() {
    let deep = [b"*1\r\n".repeat(10), b":1\r\n".to_vec()].concat();
    let long = [b"+".to_vec(), b"x".repeat(100_000)].concat();
    let wrong: [&[u8]; 7] =
        [b"HTTP/1.1 400", b":x\r\n", b"$9999999999\r\n", b"$-2\r\n", b"$1\r\nab\r\n", &deep, &long];
    for bytes in wrong {
        assert_eq!(parse(bytes), Err(Malformed), "{:?}", String::from_utf8_lossy(bytes));
    }
}

/// Encodes a reply as a server does.
fn write(reply: &Reply, out: &mut Vec<u8>) {
    match reply {
        Reply::Status(text) => out.extend(format!("+{text}\r\n").bytes()),
        Reply::Error(text) => out.extend(format!("-{text}\r\n").bytes()),
        Reply::Int(int) => out.extend(format!(":{int}\r\n").bytes()),
        Reply::Bulk(bytes) => {
            out.extend(format!("${}\r\n", bytes.len()).bytes());
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        }
        Reply::Nil => out.extend_from_slice(b"$-1\r\n"),
        Reply::Array(items) => {
            out.extend(format!("*{}\r\n", items.len()).bytes());
            items.iter().for_each(|item| write(item, out));
        }
    }
}

fn any_reply() -> impl Strategy<Value = Reply> {
    let leaf = prop_oneof![
        "[^\r\n]{0,40}".prop_map(Reply::Status),
        "[^\r\n]{0,40}".prop_map(Reply::Error),
        any::<i64>().prop_map(Reply::Int),
        vec(any::<u8>(), 0..200).prop_map(Reply::Bulk),
        Just(Reply::Nil),
    ];
    leaf.prop_recursive(4, 40, 8, |item| vec(item, 0..8).prop_map(Reply::Array))
}

/// Generates bytes that resemble replies more often than random bytes do.
fn likely_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => "[-+:$*][-0-9]{0,12}\r\n".prop_map(String::into_bytes),
        2 => "[-+:$*0-9\r\nab]{0,8}".prop_map(String::into_bytes),
        1 => vec(any::<u8>(), 0..100),
    ];
    vec(piece, 0..20).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn replies_are_parsed_as_written_wherever_the_stream_is_split(
        replies in vec(any_reply(), 1..5), splits in vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut bytes = Vec::new();
        replies.iter().for_each(|reply| write(reply, &mut bytes));
        let mut splits: Vec<usize> = splits.iter().map(|split| split.index(bytes.len() + 1)).collect();
        splits.push(bytes.len());
        splits.sort_unstable();
        // As the connection does: complete replies are parsed, the rest stays in the buffer.
        let (mut buffer, mut received, mut read) = (Vec::new(), 0, Vec::new());
        for split in splits {
            buffer.extend_from_slice(&bytes[received..split]);
            received = split;
            while let Some((reply, length)) = parse(&buffer).unwrap() {
                prop_assert!(length <= buffer.len());
                buffer.drain(..length);
                read.push(reply);
            }
        }
        prop_assert!(buffer.is_empty());
        prop_assert_eq!(read, replies);
    }

    #[test]
    fn parser_never_panics_and_more_bytes_do_not_change_a_reply(
        bytes in likely_bytes(), more in likely_bytes(),
    ) {
        if let Ok(Some((reply, length))) = parse(&bytes) {
            prop_assert!(length <= bytes.len());
            let longer = [&bytes[..], &more[..]].concat();
            prop_assert_eq!(parse(&longer), Ok(Some((reply, length))));
        }
    }
}

#[test]
fn command_is_encoded_as_an_array_of_bulk_strings() {
    assert_eq!(command(&["GET", "key"]), b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n");
    let mut out = Vec::new();
    write_array_header(&mut out, 2);
    write_bulk_parts(&mut out, &[b"simba:{", b"m", b"}"]);
    write_bulk_number(&mut out, 1_234_567_890);
    assert_eq!(out, b"*2\r\n$9\r\nsimba:{m}\r\n$10\r\n1234567890\r\n");
}
