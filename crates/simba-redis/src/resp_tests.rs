//! Beside the codec and not in it: the tests of this crate borrow the codec alone.

use crate::resp::{Malformed, Reply, begin, command, number_word, parse, words};

fn all(bytes: &[u8]) -> Reply {
    let (reply, length) = parse(bytes).unwrap().unwrap();
    assert_eq!(length, bytes.len());
    reply
}

#[test]
fn every_kind_of_reply_is_read() {
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
fn a_reply_in_pieces_is_waited_for() {
    let bytes = b"*2\r\n$5\r\nhello\r\n:12\r\n+next\r\n";
    let whole = bytes.len() - b"+next\r\n".len();
    for end in 0..whole {
        assert_eq!(parse(&bytes[..end]), Ok(None), "{end} bytes are no whole reply");
    }
    assert_eq!(parse(bytes).unwrap().unwrap().1, whole);
}

#[test]
fn what_is_no_reply_is_told() {
    let deep = [b"*1\r\n".repeat(10), b":1\r\n".to_vec()].concat();
    let long = [b"+".to_vec(), b"x".repeat(100_000)].concat();
    let wrong: [&[u8]; 7] =
        [b"HTTP/1.1 400", b":x\r\n", b"$9999999999\r\n", b"$-2\r\n", b"$1\r\nab\r\n", &deep, &long];
    for bytes in wrong {
        assert_eq!(parse(bytes), Err(Malformed), "{:?}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn no_bytes_make_the_parser_panic() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..10_000 {
        let bytes: Vec<u8> =
            (0..random.usize(0..40)).map(|_| b"+-:$*0129\r\nab"[random.usize(0..13)]).collect();
        let _ = parse(&bytes);
    }
}

#[test]
fn a_command_is_written_as_the_server_reads_it() {
    assert_eq!(command(&["GET", "key"]), b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n");
    let mut out = Vec::new();
    begin(&mut out, 2);
    words(&mut out, &[b"simba:{", b"m", b"}"]);
    number_word(&mut out, 1_234_567_890);
    assert_eq!(out, b"*2\r\n$9\r\nsimba:{m}\r\n$10\r\n1234567890\r\n");
}
