//! The answer to a DIGEST-MD5 challenge, the mechanism of ZooKeeper's own user list.

use std::collections::HashMap;
use std::fmt::Write as _;

use md5::{Digest as _, Md5};

/// What ZooKeeper's servers call themselves.
const URI: &str = "zookeeper/zk-sasl-md5";
const DEFAULT_REALM: &str = "zk-sasl-md5";

/// The answer to a challenge; nothing if it is not one of this mechanism.
pub(super) fn answer(challenge: &[u8], user: &str, password: &str) -> Option<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    respond(std::str::from_utf8(challenge).ok()?, user, password, &hex(&random))
}

fn respond(challenge: &str, user: &str, password: &str, cnonce: &str) -> Option<String> {
    let parts = directives(challenge)?;
    let nonce = parts.get("nonce")?;
    let realm = parts.get("realm").map_or(DEFAULT_REALM, String::as_str);
    let secret = md5(&[user.as_bytes(), b":", realm.as_bytes(), b":", password.as_bytes()]);
    let one = hex(&md5(&[&secret, b":", nonce.as_bytes(), b":", cnonce.as_bytes()]));
    let two = hex(&md5(&[b"AUTHENTICATE:", URI.as_bytes()]));
    let proof = hex(&md5(&[format!("{one}:{nonce}:00000001:{cnonce}:auth:{two}").as_bytes()]));
    Some(format!(
        "charset=utf-8,username=\"{}\",realm=\"{}\",nonce=\"{nonce}\",nc=00000001,cnonce=\"{cnonce}\",\
         digest-uri=\"{URI}\",maxbuf=65536,response={proof},qop=auth",
        quoted(user),
        quoted(realm)
    ))
}

/// `key=value` or `key="value"`, with commas in between.
fn directives(challenge: &str) -> Option<HashMap<String, String>> {
    let (mut found, mut rest) = (HashMap::new(), challenge);
    while let Some((key, after)) = rest.split_once('=') {
        let (value, after) = match after.strip_prefix('"') {
            Some(text) => text.split_once('"')?,
            None => after.split_once(',').map_or((after, ""), |(value, _)| (value, &after[value.len()..])),
        };
        found.insert(key.trim().to_owned(), value.to_owned());
        rest = after.trim_start_matches([',', ' ']);
    }
    Some(found)
}

fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

fn md5(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Md5::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_is_taken_apart() {
        let parts = directives("realm=\"zk, md5\",nonce=\"abc=\",charset=utf-8,algorithm=md5-sess").unwrap();
        assert_eq!(parts["realm"], "zk, md5");
        assert_eq!((&*parts["nonce"], &*parts["algorithm"]), ("abc=", "md5-sess"));
        assert_eq!(directives("realm=\"open"), None);
    }

    #[test]
    fn the_proof_depends_on_the_password_and_does_not_show_it() {
        let challenge = "realm=\"r\",nonce=\"n\",qop=\"auth\",algorithm=md5-sess,charset=utf-8";
        let proof = |password| respond(challenge, "u", password, "c").unwrap();
        assert_eq!(proof("hunter2"), proof("hunter2"));
        assert_ne!(proof("hunter2"), proof("hunter3"));
        assert!(!proof("hunter2").contains("hunter2"));
        assert_eq!(respond("qop=\"auth\"", "u", "p", "c"), None, "no nonce, no answer");
    }
}
