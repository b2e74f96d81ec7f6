//! The answer to a DIGEST-MD5 challenge, the mechanism of ZooKeeper's own user list.

use std::collections::HashMap;
use std::fmt::Write as _;

use md5::{Digest as _, Md5};

/// The service name of ZooKeeper servers.
const URI: &str = "zookeeper/zk-sasl-md5";
const DEFAULT_REALM: &str = "zk-sasl-md5";

/// The answer to a challenge.
pub(crate) struct Answer {
    pub(crate) text: String,
    /// The `rspauth` value of a server that knows the password.
    proof: String,
}

impl Answer {
    /// Returns whether the reply proves that the server knows the password.
    pub(crate) fn is_proven_by(&self, reply: &[u8]) -> bool {
        let parts = std::str::from_utf8(reply).ok().and_then(directives);
        parts.is_some_and(|parts| parts.get("rspauth") == Some(&self.proof))
    }
}

/// Returns the answer to a challenge, or `None` if the challenge belongs to another mechanism.
pub(crate) fn answer(challenge: &[u8], user: &str, password: &str) -> Option<Answer> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    respond(std::str::from_utf8(challenge).ok()?, user, password, &hex(&random))
}

fn respond(challenge: &str, user: &str, password: &str, cnonce: &str) -> Option<Answer> {
    let parts = directives(challenge)?;
    let nonce = parts.get("nonce")?;
    let realm = parts.get("realm").map_or(DEFAULT_REALM, String::as_str);
    let secret = md5(&[user.as_bytes(), b":", realm.as_bytes(), b":", password.as_bytes()]);
    let one = hex(&md5(&[&secret, b":", nonce.as_bytes(), b":", cnonce.as_bytes()]));
    // The client's proof hashes the action `AUTHENTICATE`, the server's proof an empty action.
    let proof = |action: &str| {
        let two = hex(&md5(&[action.as_bytes(), b":", URI.as_bytes()]));
        hex(&md5(&[format!("{one}:{nonce}:00000001:{cnonce}:auth:{two}").as_bytes()]))
    };
    let text = format!(
        "charset=utf-8,username=\"{}\",realm=\"{}\",nonce=\"{nonce}\",nc=00000001,cnonce=\"{cnonce}\",\
         digest-uri=\"{URI}\",maxbuf=65536,response={},qop=auth",
        quoted(user),
        quoted(realm),
        proof("AUTHENTICATE")
    );
    Some(Answer { text, proof: proof("") })
}

/// Parses a list of `key=value` or `key="value"`, separated by commas.
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
    fn a_challenge_is_parsed() {
        let parts = directives("realm=\"zk, md5\",nonce=\"abc=\",charset=utf-8,algorithm=md5-sess").unwrap();
        assert_eq!(parts["realm"], "zk, md5");
        assert_eq!((&*parts["nonce"], &*parts["algorithm"]), ("abc=", "md5-sess"));
        assert_eq!(directives("realm=\"open"), None);
    }

    #[test]
    fn the_proof_depends_on_the_password_and_does_not_show_it() {
        let challenge = "realm=\"r\",nonce=\"n\",qop=\"auth\",algorithm=md5-sess,charset=utf-8";
        let proof = |password| respond(challenge, "u", password, "c").unwrap().text;
        assert_eq!(proof("hunter2"), proof("hunter2"));
        assert_ne!(proof("hunter2"), proof("hunter3"));
        assert!(!proof("hunter2").contains("hunter2"));
        assert!(respond("qop=\"auth\"", "u", "p", "c").is_none(), "no nonce, no answer");
    }

    #[test]
    fn a_reply_without_the_right_proof_is_rejected() {
        let challenge = "realm=\"r\",nonce=\"n\",qop=\"auth\",algorithm=md5-sess,charset=utf-8";
        let (answer, other) =
            (respond(challenge, "u", "p", "c").unwrap(), respond(challenge, "u", "x", "c").unwrap());
        assert!(answer.is_proven_by(format!("rspauth={}", answer.proof).as_bytes()));
        for reply in ["", "rspauth=", "rspauth", &format!("rspauth={}", other.proof), "response=1"] {
            assert!(!answer.is_proven_by(reply.as_bytes()), "{reply}");
        }
    }
}
