//! Removes the passwords of URLs from text, for URLs that were typed in the wrong place.

use std::ffi::OsString;

/// Replaces a secret.
const MASK: &str = "***";

/// Returns the text without the secrets of these arguments.
pub(crate) fn redact(text: &str, words: &[OsString]) -> String {
    let mut text = text.to_owned();
    for word in words {
        for secret in secrets(&word.to_string_lossy()) {
            text = text.replace(&secret, MASK);
        }
    }
    text
}

/// Returns the text at the position of the password, and the values of the query keys. The argument may be an invalid
/// URL, so it returns more than necessary.
fn secrets(word: &str) -> Vec<String> {
    let Some((_, rest)) = word.split_once("://") else { return Vec::new() };
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let login = rest.rsplit_once('@').map_or("", |(login, _)| login);
    let password = login.split_once(':').map(|(_, password)| password);
    let values = query.split('&').filter_map(|pair| Some(pair.split_once('=')?.1));
    password.into_iter().chain(values).filter(|secret| !secret.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_hidden_in_every_position() {
        let words = ["redis://me:s3cret@h/0?password=hunter2".into(), "deploy".into()];
        let text = "unrecognized subcommand 'redis://me:s3cret@h/0?password=hunter2'";
        assert_eq!(redact(text, &words), "unrecognized subcommand 'redis://me:***@h/0?password=***'");
        assert!(secrets("redis://h/0").is_empty() && secrets("a:b@c").is_empty());
        assert_eq!(secrets("x://:p@h"), ["p"]);
    }
}
