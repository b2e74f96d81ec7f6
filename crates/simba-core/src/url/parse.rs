//! The parser of [`ConnectUrl`]. An error names the wrong part and contains nothing that may be a secret.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::percent::decode;
use super::{ConnectUrl, Host, PASSWORD_FILE, Password};
use crate::error::{Error, Result};

const PORT_RANGE: &str = "has a port out of range: take 1 to 65535";

pub(super) fn parse(text: &str) -> Result<ConnectUrl> {
    check_text(text)?;
    let (scheme, rest) = split_scheme(text)?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
        None => ("", rest),
    };
    // A `/` or `?` in a password ends the authority before its end: the rest of the password would be parsed as
    // the path, which is not hidden. The `@` after it shows that this happened.
    if path.contains('@') || query.contains('@') {
        return Err(Error::invalid(
            "the URL has an `@` outside of its user part: percent-encode special characters in the password, \
             and write any other `@` as %40",
        ));
    }
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = parse_login(login)?;
    let mut query = parse_query(query)?;
    let password = match (password, query.remove(PASSWORD_FILE)) {
        (Some(_), Some(_)) => {
            return Err(Error::invalid(format!(
                "the URL has a password and `{PASSWORD_FILE}`: keep one of them"
            )));
        }
        (_, Some(path)) if path.is_empty() => {
            return Err(Error::invalid(format!(
                "the key `{PASSWORD_FILE}` of the URL names no file: add its path"
            )));
        }
        (_, Some(path)) => Some(Password::in_file(path)),
        (text, None) => text.map(Password::from),
    };
    let hosts = if authority.is_empty() { Vec::new() } else { parse_hosts(hosts, may_contain_login(text))? };
    Ok(ConnectUrl { scheme, user, password, hosts, path: decode("path", path)?, query })
}

fn check_text(text: &str) -> Result<()> {
    if text.len() > ConnectUrl::MAX_LEN {
        let max = ConnectUrl::MAX_LEN;
        return Err(Error::invalid(format!("a URL has at most {max} bytes, this one has {}", text.len())));
    }
    if let Some(at) = text.chars().position(|c| c.is_whitespace() || c.is_control()) {
        return Err(Error::invalid(format!(
            "the URL has a space or control character at position {at}: remove it, or write a space as %20"
        )));
    }
    match text.chars().position(|c| c == '#') {
        Some(at) => Err(Error::invalid(format!(
            "the URL has a fragment at position {at}, which no store takes: write a `#` itself as %23 \
             (percent-encode special characters in the password)"
        ))),
        None => Ok(()),
    }
}

fn split_scheme(text: &str) -> Result<(String, &str)> {
    let (scheme, rest) = text.split_once(':').ok_or_else(|| {
        Error::invalid("the URL has no scheme: start it with the store, such as `redis://` or `sqlite:`")
    })?;
    if !scheme.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return Err(Error::invalid(
            "the URL does not start with a scheme: put the store before it, such as `redis://`",
        ));
    }
    match scheme.chars().position(|c| !c.is_ascii_alphanumeric() && !matches!(c, '+' | '.' | '-')) {
        Some(at) => Err(Error::invalid(format!(
            "the scheme of the URL takes the characters a-z 0-9 + . - only, there is another at position \
             {at} (is the `:` after the scheme missing?)"
        ))),
        None => Ok((scheme.to_ascii_lowercase(), rest)),
    }
}

fn parse_login(text: &str) -> Result<(Option<String>, Option<String>)> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (text, None),
    };
    let user = decode("user", user)?;
    let password = password.map(|password| decode("password", password)).transpose()?;
    Ok((Some(user).filter(|user| !user.is_empty()), password))
}

/// Returns whether the text in the place of a host may be a part of a user or password.
fn may_contain_login(text: &str) -> bool {
    text.contains('@') || text.contains("%40")
}

fn parse_hosts(text: &str, may_be_secret: bool) -> Result<Vec<Host>> {
    let host = |(at, text)| parse_host(text).map_err(|fault| fault.into_error(at + 1, may_be_secret));
    text.split(',').enumerate().map(host).collect()
}

/// An error in a host.
enum Fault<'a> {
    Is(&'static str),
    Port(&'a str),
}

impl Fault<'_> {
    fn into_error(self, number: usize, may_be_secret: bool) -> Error {
        let what = match self {
            Self::Is(what) => what,
            Self::Port(port) if !may_be_secret => {
                return Error::invalid(format!(
                    "host {number} of the URL has the port {port}: take 1 to 65535"
                ));
            }
            Self::Port(_) => PORT_RANGE,
        };
        let hint = if may_be_secret { " (percent-encode special characters in the password)" } else { "" };
        Error::invalid(format!("host {number} of the URL {what}{hint}"))
    }
}

fn parse_host(text: &str) -> Result<Host, Fault<'_>> {
    if let Some(text) = text.strip_prefix('[') {
        return parse_v6(text);
    }
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    if port.is_some_and(|port| port.contains(':')) {
        return Err(Fault::Is("has more than one `:`: write an IPv6 address in brackets, as [::1]:6379"));
    }
    if name.is_empty() {
        return Err(Fault::Is("is empty: name it, or remove the comma, `:` or `@` beside it"));
    }
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')) {
        return Err(Fault::Is("takes the characters A-Z a-z 0-9 . _ - only, or an IPv6 address in brackets"));
    }
    Ok(Host { name: name.to_owned(), port: port.map(parse_port).transpose()? })
}

fn parse_v6(text: &str) -> Result<Host, Fault<'_>> {
    let (address, rest) = text.split_once(']').ok_or(Fault::Is("has a `[` without `]`: close it"))?;
    let address: Ipv6Addr = address
        .parse()
        .map_err(|_| Fault::Is("has no IPv6 address in its brackets: write it as [::1], without a zone"))?;
    let port = match rest.strip_prefix(':') {
        Some(port) => Some(parse_port(port)?),
        None if rest.is_empty() => None,
        None => {
            return Err(Fault::Is("has more than a `:` and a port after the `]`: remove it"));
        }
    };
    Ok(Host { name: address.to_string(), port })
}

fn parse_port(text: &str) -> Result<u16, Fault<'_>> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Fault::Is("has a port that is no number: take 1 to 65535"));
    }
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        // More digits than any port has may be a password with its `@` missing.
        _ if text.len() > 5 => Err(Fault::Is(PORT_RANGE)),
        _ => Err(Fault::Port(text)),
    }
}

fn parse_query(text: &str) -> Result<BTreeMap<String, String>> {
    let mut query = BTreeMap::new();
    let pairs = text.split('&').filter(|_| !text.is_empty());
    for (number, pair) in (1..).zip(pairs) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if key.is_empty() {
            return Err(Error::invalid(format!(
                "parameter {number} in the query of the URL has no name: write it as name=value"
            )));
        }
        if query.insert(decode("query", key)?, decode("query", value)?).is_some() {
            return Err(Error::invalid(format!(
                "parameter {number} in the query of the URL has the name of an earlier one: keep one of them"
            )));
        }
    }
    Ok(query)
}
