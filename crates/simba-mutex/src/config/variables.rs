//! Environment variables: which are settings, and which are probably misspelt.

use super::keys::{self, KEYS, Key, STORES};

/// The prefix of all variables of Simba.
const PREFIX: &str = "SIMBA_";

/// The variables that the command line reads, or sets for the commands that it runs. They are not settings.
const OF_THE_COMMAND: [&str; 5] =
    ["SIMBA_CONFIG", "SIMBA_LOG", "SIMBA_MUTEX", "SIMBA_CONTENDER_ID", "SIMBA_FENCING_TOKEN"];

/// The greatest edit distance of a name that counts as misspelt.
const MAX_DISTANCE: usize = 2;

/// The kind of a variable.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Variable {
    Setting(Key),
    /// Probably a misspelling of this name.
    Misspelt(String),
    /// Unknown, with the prefix of Simba.
    Unknown,
    /// Of another program, or not a setting.
    Other,
}

/// Returns the kind of the variable with this name.
pub(super) fn classify(name: &str) -> Variable {
    if let Some(key) = setting(name) {
        return Variable::Setting(key);
    }
    if !name.starts_with(PREFIX) || OF_THE_COMMAND.contains(&name) {
        return Variable::Other;
    }
    if is_from_kubernetes(name) {
        return Variable::Unknown;
    }
    let distances = known().map(|known| (distance(name, &known), known));
    let similar = distances.filter(|(distance, _)| *distance <= MAX_DISTANCE);
    similar.min().map_or(Variable::Unknown, |(_, known)| Variable::Misspelt(known))
}

/// Returns the setting that a variable names: `SIMBA_TTL`, `SIMBA_REDIS_TTL`.
fn setting(name: &str) -> Option<Key> {
    let words = name.strip_prefix(PREFIX)?.to_ascii_lowercase();
    if let Some(name) = keys::key(&words) {
        return Some(Key { store: None, name });
    }
    let (store, rest) = words.split_once('_')?;
    Some(Key { store: Some(keys::store(store)?), name: keys::key(rest)? })
}

/// Returns all known names.
fn known() -> impl Iterator<Item = String> {
    let stores = STORES.iter().map(|(store, _)| format!("{PREFIX}{store}_"));
    let prefixes = std::iter::once(PREFIX.to_owned()).chain(stores);
    let settings = prefixes.flat_map(|prefix| KEYS.map(|key| format!("{prefix}{key}")));
    let settings = settings.map(|name| name.to_ascii_uppercase().replace('-', "_"));
    settings.chain(OF_THE_COMMAND.map(str::to_owned))
}

/// Returns whether Kubernetes sets a variable with this name in every container when a Service is called `simba` or
/// `simba-…`. By its distance, `SIMBA_PORT` would count as a misspelt `SIMBA_POLL`.
fn is_from_kubernetes(name: &str) -> bool {
    name.ends_with("_PORT")
        || ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"].iter().any(|part| name.contains(part))
}

/// Returns the edit distance (Levenshtein) of two texts.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, expected) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *expected);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_changed_added_and_missing_letters() {
        for (one, other, expected) in [
            ("", "", 0),
            ("URL", "URL", 0),
            ("URI", "URL", 1),
            ("ULR", "URL", 2),
            ("TT", "TTL", 1),
            ("", "ab", 2),
        ] {
            assert_eq!((distance(one, other), distance(other, one)), (expected, expected), "{one} {other}");
        }
    }

    #[test]
    fn misspelt_variable_names_the_intended_one() {
        for (name, intended) in [
            ("SIMBA_URI", "SIMBA_URL"),
            ("SIMBA_ULR", "SIMBA_URL"),
            ("SIMBA_TTLS", "SIMBA_TTL"),
            ("SIMBA_PASSWD_FILE", "SIMBA_PASSWORD_FILE"),
            ("SIMBA_REDIS_UR", "SIMBA_REDIS_URL"),
            ("SIMBA_REDDIS_TTL", "SIMBA_REDIS_TTL"),
            ("SIMBA_CONFG", "SIMBA_CONFIG"),
            ("SIMBA_LOGS", "SIMBA_LOG"),
        ] {
            assert_eq!(classify(name), Variable::Misspelt(intended.into()), "{name}");
        }
    }

    #[test]
    fn known_variables_are_settings_or_of_the_command_line() {
        for name in known() {
            let expected = OF_THE_COMMAND.contains(&name.as_str());
            assert_eq!(classify(&name) == Variable::Other, expected, "{name}");
            assert_eq!(matches!(classify(&name), Variable::Setting(_)), !expected, "{name}");
        }
    }

    #[test]
    fn variables_of_kubernetes_and_of_tests_are_not_refused() {
        let services =
            ["SIMBA", "SIMBA_REDIS", "SIMBA_SQLITE", "SIMBA_MYSQL", "SIMBA_POSTGRES", "SIMBA_ETCD"];
        let parts = [
            "PORT",
            "SERVICE_HOST",
            "SERVICE_PORT",
            "SERVICE_PORT_HTTP",
            "PORT_80_TCP",
            "PORT_80_TCP_ADDR",
            "PORT_80_TCP_PORT",
            "PORT_80_TCP_PROTO",
            "PORT_53_UDP",
        ];
        let of_services = services.iter().flat_map(|service| parts.map(|part| format!("{service}_{part}")));
        let of_tests = [
            "SIMBA_BENCH_ZOOKEEPER",
            "SIMBA_FAULT_ROUNDS",
            "SIMBA_ROW_45",
            "SIMBA_SEED",
            "SIMBA_SQLITE_PART",
            "SIMBA_TCK_ETCD",
            "SIMBA_TCK_REDIS",
            "SIMBA_TCK_SKIPS",
            "SIMBA_TCK_TLS",
            "SIMBA_TEST_CHILD",
        ];
        for name in of_services.chain(of_tests.map(str::to_owned)) {
            assert_eq!(classify(&name), Variable::Unknown, "{name}");
        }
        assert_eq!(classify("OTHER_URI"), Variable::Other);
        assert_eq!(classify("SIMBA"), Variable::Other);
    }
}
