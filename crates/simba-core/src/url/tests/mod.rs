use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;
use crate::error::ErrorKind;

fn url(text: &str) -> ConnectUrl {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn rejection(text: &str) -> String {
    let error = text.parse::<ConnectUrl>().expect_err(text);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    error.to_string()
}

/// Returns all parts in one line: scheme, user, password, hosts, path and query.
fn parts(url: &ConnectUrl) -> String {
    let hosts: Vec<_> = url.hosts().iter().map(Host::to_string).collect();
    let query: Vec<_> = url.queries().map(|(key, value)| format!("{key}={value}")).collect();
    let user = url.user().unwrap_or("-");
    let password = url.password().map_or_else(|| "-".to_owned(), |password| password.read().unwrap());
    let (hosts, query) = (hosts.join(" "), query.join(" "));
    format!("{} | {user} | {password} | {hosts} | {} | {query}", url.scheme(), url.path())
}

const GOOD: &[(&str, &str)] = &[
    ("memory:", "memory | - | - |  |  | "),
    ("memory://", "memory | - | - |  |  | "),
    ("sqlite:a/b.db", "sqlite | - | - |  | a/b.db | "),
    ("sqlite:/abs/x.db?mode=wal", "sqlite | - | - |  | /abs/x.db | mode=wal"),
    ("sqlite:///abs/x.db", "sqlite | - | - |  | /abs/x.db | "),
    ("sqlite:/m%C3%BC%20ä/a%40b%23%3f%25", "sqlite | - | - |  | /mü ä/a@b#?% | "),
    ("mysql://user:pw@h1:3306/db?x=y", "mysql | user | pw | h1:3306 | /db | x=y"),
    ("mariadb://user@h_1", "mariadb | user | - | h_1 |  | "),
    ("POSTGRES://u:a%3Ab%2F%40@Db.Example/d", "postgres | u | a:b/@ | Db.Example | /d | "),
    ("postgres://u:a:b@c@h/d", "postgres | u | a:b@c | h | /d | "),
    ("postgres://me%40corp:@h", "postgres | me@corp |  | h |  | "),
    ("redis://h", "redis | - | - | h |  | "),
    ("redis://@h?", "redis | - | - | h |  | "),
    ("redis://:pw@127.0.0.1:6379/0", "redis | - | pw | 127.0.0.1:6379 | /0 | "),
    ("rediss://h:65535?b&a=1+2=3&c=%26", "rediss | - | - | h:65535 |  | a=1+2=3 b= c=&"),
    ("redis+cluster://h1:1,h2:2", "redis+cluster | - | - | h1:1 h2:2 |  | "),
    ("redis+sentinel://h1,h2,h3/mymaster/0", "redis+sentinel | - | - | h1 h2 h3 | /mymaster/0 | "),
    ("redis+unix:/run/redis.sock", "redis+unix | - | - |  | /run/redis.sock | "),
    ("zookeeper://h1:2181,h2/chroot/x", "zookeeper | - | - | h1:2181 h2 | /chroot/x | "),
    ("etcd://[::1],[fe80:0::A]:2379,h2:080", "etcd | - | - | [::1] [fe80::a]:2379 h2:80 |  | "),
];

#[test]
fn valid_urls_have_all_their_parts() {
    for (text, expected) in GOOD {
        assert_eq!(parts(&url(text)), *expected, "{text}");
    }
}

const BAD: &[(&str, &str)] = &[
    ("", "no scheme"),
    ("localhost", "no scheme"),
    (":x", "does not start with a scheme"),
    ("127.0.0.1:6379", "does not start with a scheme"),
    ("redis//h:1", "another at position 5"),
    ("rédis://h", "another at position 1"),
    ("redis://h\n", "control character at position 9: remove it"),
    ("sqlite:/a b", "at position 9: remove it, or write a space as %20"),
    ("sqlite:/a\u{a0}b", "at position 9"),
    ("sqlite:/a\0b", "at position 9"),
    ("redis://h/0#x", "fragment at position 11, which no store takes: write a `#` itself as %23"),
    ("redis://h:0", "host 1 of the URL has the port 0: take 1 to 65535"),
    ("redis://a,h:65536/0", "host 2 of the URL has the port 65536: take 1 to 65535"),
    ("redis://h:123456789", "host 1 of the URL has a port out of range"),
    ("redis://h:", "port that is no number"),
    ("redis://h:+1", "port that is no number"),
    ("redis://h:8o", "port that is no number"),
    ("redis://a,,b", "host 2 of the URL is empty"),
    ("redis://a,", "host 2 of the URL is empty"),
    ("redis://:6379", "host 1 of the URL is empty"),
    ("redis://user@/0", "host 1 of the URL is empty"),
    ("redis://::1:6379", "write an IPv6 address in brackets"),
    ("redis://[::1", "`[` without `]`"),
    ("redis://[::1]6379", "more than a `:` and a port after the `]`"),
    ("redis://[::1]:0", "has the port 0"),
    ("redis://[127.0.0.1]", "no IPv6 address in its brackets"),
    ("redis://[fe80::1%25eth0]", "without a zone"),
    ("redis://hö", "takes the characters A-Z a-z 0-9 . _ - only"),
    ("redis://h%41", "takes the characters A-Z a-z 0-9 . _ - only"),
    ("sqlite:/a%", "the path of the URL has a `%` without two hexadecimal digits"),
    ("sqlite:/a%4", "without two hexadecimal digits"),
    ("sqlite:/a%+1b", "without two hexadecimal digits"),
    ("sqlite:/a%4é", "without two hexadecimal digits"),
    ("sqlite:/a%ff", "in the path of the URL must make UTF-8"),
    ("sqlite:/a%00", "the path of the URL has an escaped control character"),
    ("redis://%zz@h", "the user of the URL has a `%`"),
    ("redis://u:%zz@h", "the password of the URL has a `%`"),
    ("redis://h?a=%zz", "the query of the URL has a `%`"),
    ("redis://h?a=1&%61=2", "parameter 2 in the query of the URL has the name of an earlier one"),
    ("redis://h?a=1&&b", "parameter 2 in the query of the URL has no name"),
    ("redis://h?=1", "parameter 1 in the query of the URL has no name"),
    ("redis://u:p@h?password_file=/x", "a password and `password_file`: keep one of them"),
    ("redis://h?password_file", "names no file"),
    ("sqlite:a@b", "write any other `@` as %40"),
    ("redis://h/a@b", "write any other `@` as %40"),
    ("redis://h?a=b@c", "write any other `@` as %40"),
];

#[test]
fn invalid_urls_are_rejected_with_the_position_and_a_fix() {
    for (text, fragment) in BAD {
        let message = rejection(text);
        assert!(message.contains(fragment), "{text}: {message}");
        assert!(!message.ends_with('.') && message.starts_with(char::is_lowercase), "{message}");
    }
}

#[test]
fn url_has_at_most_the_maximum_length() {
    let path = "x".repeat(ConnectUrl::MAX_LEN - "sqlite:".len());
    assert_eq!(url(&format!("sqlite:{path}")).path(), path);
    assert_eq!(rejection(&format!("sqlite:{path}x")), "a URL has at most 4096 bytes, this one has 4097");
}

#[test]
fn display_is_ascii_and_parses_to_the_same_url() {
    for (text, shown) in [
        ("memory://", "memory:"),
        ("sqlite:///abs/x.db", "sqlite:/abs/x.db"),
        ("sqlite:////abs", "sqlite:////abs"),
        ("sqlite:%2f%2fabs", "sqlite:////abs"),
        ("sqlite:C:\\ä", "sqlite:C:%5C%C3%A4"),
        ("Mysql://a@b:x@h", "mysql://a%40b:***@h"),
        ("mysql://a%3ab@h,[0::1]:2/x%3fy", "mysql://a%3Ab@h,[::1]:2/x%3Fy"),
        ("redis://h?b=1%262&a&c%3d=+/", "redis://h?a&b=1%262&c%3D=+/"),
    ] {
        assert_eq!(url(text).to_string(), shown);
        assert_eq!(url(shown).password.is_some(), url(text).password.is_some());
        assert!(shown.contains(MASK) || url(shown) == url(text), "{text}");
    }
}

#[test]
fn display_and_debug_hide_secrets() {
    for (text, shown) in [
        ("redis://:CANARY@h", "redis://:***@h"),
        ("redis://u:CANARY%2F0%23@h", "redis://u:***@h"),
        ("redis://u:CANARY@CANARY:CANARY@h/0", "redis://u:***@h/0"),
        ("redis://h?myPassWord=CANARY&x=1", "redis://h?myPassWord=***&x=1"),
        ("redis://h?Client_Secret=CANARY&to%6ben=CANARY", "redis://h?Client_Secret=***&token=***"),
        ("redis://h?ssl\u{212a}ey=CANARY&key", "redis://h?key=***&ssl%E2%84%AAey=***"),
    ] {
        let url = url(text);
        assert_eq!(url.to_string(), shown);
        assert_eq!(format!("{url:?}"), format!("ConnectUrl({shown})"));
        assert!(!format!("{url:#?}").contains("CANARY"));
    }
}

#[test]
fn password_from_another_source_is_not_decoded_and_hidden() {
    for (text, shown) in [
        ("redis://h/0", "redis://:***@h/0"),
        ("redis://u:old@h", "redis://u:***@h"),
        ("sqlite:/x", "sqlite://:***@/x"),
    ] {
        let url = url(text).with_password("CAN%41RY /@\n");
        assert_eq!(url.password(), Some(&Password::from("CAN%41RY /@\n")));
        assert_eq!(url.to_string(), shown);
    }
}

#[test]
fn password_file_is_read_at_each_use_and_shown_by_its_path() {
    let path = std::env::temp_dir().join(format!("simba-password-{}", std::process::id()));
    let url = url(&format!("redis://u@h/0?db=1&password_file={}", path.display()));
    assert_eq!(url.to_string(), format!("redis://u@h/0?db=1&password_file={}", path.display()));
    assert_eq!(url.queries().collect::<Vec<_>>(), [("db", "1")]);
    let password = url.password().unwrap();
    for (content, expected) in [("one", "one"), (" two \r\n\n", " two "), ("", "")] {
        std::fs::write(&path, content).unwrap();
        assert_eq!(password.read().unwrap(), expected);
    }
    std::fs::remove_file(&path).unwrap();
    let error = password.read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

const MALFORMED: &[&str] = &[
    "redis://:CANARY/ss@host",
    "redis://:pa/CANARY@host",
    "redis://u:12/CANARY@host:1/0",
    "redis://u:CANARY?x@host",
    "redis://u:12?CANARY@host",
    "redis://u:CANARY#x@host",
    "redis://u:x#CANARY@host",
    "redis://u:CAN@CANARY/x@host",
    "redis://u:x@CANARY/x@host",
    "redis:/u:CANARY@host",
    "redis:///u:CANARY@host",
    "redis:u:CANARY@host",
    "redis://u:CANARY@host:0",
    "redis://u:CANARY@host:CANARY",
    "redis://u:CANARY@host,CANARY!",
    "redis://u:CANARY@",
    "redis://u:CANARY%40host",
    "redis://:CANARY%40host",
];

#[test]
fn error_about_a_malformed_password_has_a_fix_and_not_the_password() {
    for text in MALFORMED {
        let message = rejection(text);
        assert!(!message.contains("CANARY"), "{text}: {message}");
        assert!(message.contains("percent-encode special characters in the password"), "{text}: {message}");
    }
    for text in ["redis://u:CANARY", "redis:://u:CANARY@h", "redis//u:CANARY@h", "redis://u:CANARY%zz@h"] {
        assert!(!rejection(text).contains("CANARY"), "{text}");
    }
}

#[test]
fn errors_do_not_contain_digits_that_may_be_a_password() {
    for text in
        ["redis://u:77777@h:88888", "redis://u:88888%40h", "redis://u:88888/x%40h", "redis://u:888888"]
    {
        assert!(!rejection(text).contains("8888"), "{text}");
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() }
}

const FRAGMENTS: &[&str] = &[
    "redis", "sqlite", "A", ":", "//", "/", "@", ",", "[", "]", "::1", "[::1]", "?", "&", "=", "#", "%",
    "%4", "%40", "%2F", "%ff", "%00", "%C3%A4", "ä", "+", ".", "-", "*", "h1", "h2:2", ":0", ":6379",
    "65536", "key", "x", "\\", " ", "\0",
];

/// Strings that resemble URLs.
fn urlish() -> impl Strategy<Value = String> {
    let start = select(&["", "redis:", "redis://", "redis://h/", "redis://h?", "redis://u:p@h,"][..]);
    (start, vec(select(FRAGMENTS), 0..12)).prop_map(|(start, rest)| start.to_owned() + &rest.concat())
}

fn arbitrary() -> impl Strategy<Value = String> {
    let start = select(&["", "redis:", "redis://", "redis://h/", "redis://h?", "redis://u:"][..]);
    (start, vec(any::<char>(), 0..40)).prop_map(|(start, rest)| start.to_owned() + &String::from_iter(rest))
}

/// Checks that the text is a URL or an `Invalid` error, and that the `Display` of a URL without secrets parses to it.
fn check_any(text: &str) -> std::result::Result<(), TestCaseError> {
    match ConnectUrl::try_from(text) {
        Ok(url) if url.password().is_none() && !url.queries().any(|(key, _)| is_secret(key)) => {
            prop_assert_eq!(url.to_string().parse::<ConnectUrl>().unwrap(), url);
        }
        Ok(url) => prop_assert!(url.to_string().contains(MASK)),
        Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Invalid),
    }
    Ok(())
}

fn host() -> impl Strategy<Value = Host> {
    let name = prop_oneof![
        "[a-zA-Z0-9._-]{1,8}",
        any::<std::net::Ipv6Addr>().prop_map(|address| address.to_string()),
    ];
    (name, option::of(1..=u16::MAX)).prop_map(|(name, port)| Host { name, port })
}

/// Text without control characters, which the parser rejects even if escaped.
fn plain(size: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = String> {
    let plain = |c: char| if c.is_control() { '%' } else { c };
    vec(any::<char>(), size).prop_map(move |chars| chars.into_iter().map(plain).collect())
}

prop_compose! {
    /// Any possible URL without a password.
    fn any_url()(
        scheme in "[a-z][a-z0-9+.-]{0,5}",
        user in option::of(plain(1..=6)),
        hosts in vec(host(), 0..4),
        path in plain(0..=8),
        slashes in "/{0,3}",
        query in proptest::collection::btree_map(plain(1..=4), plain(0..=4), 0..4),
    ) -> ConnectUrl {
        let user = user.filter(|_| !hosts.is_empty());
        let rooted = hosts.is_empty() || path.is_empty() && slashes.is_empty();
        let path = format!("{}{slashes}{path}", if rooted { "" } else { "/" });
        ConnectUrl { scheme, user, password: None, hosts, path, query }
    }
}

/// Special characters in a password that are not escaped.
fn junk() -> impl Strategy<Value = String> {
    let piece =
        select(&["/", "?", "#", "@", ":", ",", "%", "[", "]", "&", "=", "1", "%zz", "%2F", "12", " "][..]);
    vec(piece, 0..4).prop_map(|pieces| pieces.concat())
}

/// The text around a password: up to the `:` before it, and from the `@` after it.
fn surroundings() -> impl Strategy<Value = (String, String)> {
    let start = select(&["redis://:", "redis://u:", "POSTGRES://me%40corp:", "x+y://u@v:"][..]);
    let hosts = select(&["h", "h:1", "h:0", "h:99999", "a,b:2", "a,,b", "[::1]:3", "[::1", "", "h!"][..]);
    let end = select(&["", "/", "/db", "/a/b?x=y", "?x=%zz", "?token=CANARYpw", "?x=1&x=2", "/a%ff"][..]);
    (start, hosts, end).prop_map(|(start, hosts, end)| (start.to_owned(), format!("@{hosts}{end}")))
}

fn check_canary(text: &str) -> std::result::Result<(), TestCaseError> {
    let shown = match text.parse::<ConnectUrl>() {
        Ok(url) => format!("{url} {url:?} {url:#?}"),
        Err(error) => format!("{error} {error:?} {error:#?}"),
    };
    prop_assert!(!shown.contains("CANARY"), "{text}: {shown}");
    Ok(())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_text_is_a_url_or_invalid(text in arbitrary()) {
        check_any(&text)?;
    }

    #[test]
    fn any_urlish_text_is_a_url_or_invalid(text in urlish()) {
        check_any(&text)?;
    }

    #[test]
    fn display_of_any_url_without_secrets_parses_to_the_same_url(mut url in any_url()) {
        url.query.retain(|key, _| !is_secret(key));
        let shown = url.to_string();
        prop_assert!(shown.is_ascii());
        prop_assert_eq!(shown.parse::<ConnectUrl>().unwrap(), url, "{}", shown);
    }

    #[test]
    fn no_secret_is_shown_whatever_the_password_contains(
        (start, end) in surroundings(), before in junk(), after in junk(),
    ) {
        check_canary(&format!("{start}{before}CANARYpw{after}{end}"))?;
    }

    #[test]
    fn no_secret_is_shown_whatever_is_inserted_before_the_query(
        (start, end) in surroundings(), at in any::<Index>(), junk in junk(),
    ) {
        let (end, _) = end.split_once('?').unwrap_or((&end, ""));
        let text = format!("{start}CANARYpw{end}");
        let at = at.index(text.len() + 1);
        check_canary(&format!("{}{junk}{}", &text[..at], &text[at..]))?;
    }

    #[test]
    fn no_secret_is_shown_if_the_url_is_truncated_or_lacks_a_character(
        (start, end) in surroundings(), at in any::<Index>(),
    ) {
        let text = format!("{start}CANARYpw{end}");
        let at = at.index(text.len());
        // Without the colon before it, or under another key, it is not recognizable as a secret.
        if at + 1 != start.len() && !text[..=at].contains('?') {
            check_canary(&format!("{}{}", &text[..at], &text[at + 1..]))?;
        }
        check_canary(&text[..at])?;
    }
}

#[test]
fn unknown_key_is_rejected_with_the_known_ones() {
    let url: ConnectUrl = "mysql://h/db?pol=2s".parse().unwrap();
    let error = url.only_keys(&["poll", "table"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(error.to_string(), "the URL has the unknown key `pol`: `mysql` takes poll, table");
    assert!(url.only_keys(&[]).unwrap_err().to_string().contains("takes none"));
    url.only_keys(&["pol"]).unwrap();
}

#[test]
fn duration_and_number_are_parsed_or_rejected_by_key() {
    let url: ConnectUrl = "mysql://h?poll=250ms&connections=4&bad=secret".parse().unwrap();
    assert_eq!(url.duration("poll").unwrap(), Some(std::time::Duration::from_millis(250)));
    assert_eq!(url.duration("absent").unwrap(), None);
    assert_eq!(url.parsed::<u8>("connections", "a number from 1 to 64").unwrap(), Some(4));
    let errors = [
        url.duration("bad").unwrap_err().to_string(),
        url.parsed::<u8>("bad", "a number from 1 to 64").unwrap_err().to_string(),
    ];
    assert!(errors.iter().all(|text| text.contains("`bad`") && !text.contains("secret")), "{errors:?}");
}
