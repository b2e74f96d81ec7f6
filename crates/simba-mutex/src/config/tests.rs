use super::*;

fn lease_of(config: &Config) -> (u64, u64) {
    let lease = config.resolve().unwrap().lease;
    (lease.ttl().as_secs(), lease.transition().as_secs())
}

fn refusal(config: Result<Config>) -> String {
    let error = config.and_then(|config| config.resolve()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    error.to_string()
}

fn variables(pairs: &[(&str, &str)]) -> Config {
    Config::new().variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

#[test]
fn defaults_are_those_of_jvm_simba() {
    let settings = Config::new().resolve().unwrap();
    assert_eq!(lease_of(&Config::new()), (10, 6));
    assert_eq!((settings.initial_delay, settings.url.scheme()), (Duration::ZERO, "sqlite"));
}

#[test]
fn later_layers_and_settings_of_a_store_override() {
    let file = Config::new().toml("ttl = '20s'\n[redis]\nttl = '5s'\ntransition = '3s'\n", "a.toml").unwrap();
    assert_eq!(lease_of(&file), (20, 6));
    let redis = file.clone().url("redis://h");
    assert_eq!(lease_of(&redis), (5, 3));
    assert_eq!(lease_of(&file.clone().url("rediss://h")), (5, 3));
    let environment = redis.variables([("SIMBA_REDIS_TTL".to_owned(), "7s".to_owned())]);
    assert_eq!(lease_of(&environment), (7, 3));
    let code = environment.lease(Duration::from_secs(9), Duration::from_secs(4));
    assert_eq!(lease_of(&code), (9, 4));
}

#[test]
fn url_in_the_environment_overrides_every_url_in_a_file() {
    for file in
        ["url = 'mysql://file/db'\n", "[redis]\nurl = 'redis://file'\n", "[mysql]\nurl = 'mysql://file/db'\n"]
    {
        for name in ["SIMBA_URL", "SIMBA_REDIS_URL"] {
            let config = Config::new().toml(file, "a.toml").unwrap();
            let config = config.variables([(name.to_owned(), "redis://variable".to_owned())]);
            assert_eq!(config.resolve().unwrap().url.to_string(), "redis://variable", "{name}: {file}");
        }
    }
    // Two variables that name different stores are not resolved by chance.
    let both = variables(&[("SIMBA_REDIS_URL", "redis://h"), ("SIMBA_MYSQL_URL", "mysql://h/db")]);
    assert!(refusal(Ok(both)).contains("keep one"));
}

#[test]
fn scheme_with_tls_uses_the_settings_of_its_store() {
    for (store, scheme) in [("redis", "rediss"), ("zookeeper", "zookeepers"), ("etcd", "etcds")] {
        let file = Config::new().toml(&format!("[{store}]\nttl = '5s'\n"), "a.toml").unwrap();
        assert_eq!(lease_of(&file.clone().url(format!("{store}://h"))), (5, 6));
        assert_eq!(lease_of(&file.url(format!("{scheme}://h"))), (5, 6), "{scheme}");
    }
}

#[test]
fn file_of_the_spring_boot_starter_is_read() {
    let text = "simba:\n  enabled: true\n  jdbc:\n    initial-delay: 2s\n    ttl: 12s\nspring:\n  x: [1]\n";
    let config = Config::new().yaml(text, "application.yml").unwrap().url("mysql://h/db");
    let settings = config.resolve().unwrap();
    assert_eq!((settings.lease.ttl().as_secs(), settings.initial_delay.as_secs()), (12, 2));
}

#[test]
fn error_has_the_line_and_the_fix() {
    let toml = |text: &str| refusal(Config::new().toml(text, "simba.toml"));
    for (text, line, fix) in [
        ("ttl = '1s'\ntll = '5s'\n", 2, "the keys are enabled, url"),
        ("[redis]\nurll = 'x'\n", 2, "the keys are enabled, url"),
        ("ttl = 'ten'\n", 1, "`250ms` or `10s`"),
        ("ttl = ['10s']\n", 1, "wrong type"),
        ("enabled = 'maybe'\n", 1, "neither true nor false"),
        ("\nenabled = false\n", 2, "set `enabled` to true"),
        ("ttl = '10s'\ntransition = '1s'\n", 1, "transition"),
        ("grace = '1h'\n", 1, "grace"),
        ("url = 'a b'\n", 1, "space"),
        ("[redis]\nurl = 'redis://a'\n[mysql]\nurl = 'mysql://b'\n", 2, "keep one"),
        ("password = 'x'\npassword-file = 'y'\n", 2, "keep one"),
        ("password-file = '/no/such/file'\n", 1, "cannot read"),
    ] {
        let error = toml(text);
        assert!(error.starts_with(&format!("simba.toml, line {line}: ")), "{text:?}: {error}");
        assert!(error.contains(fix), "{text:?}: {error}");
    }
    assert!(refusal(Ok(variables(&[("SIMBA_TTL", "ten")]))).starts_with("the variable SIMBA_TTL: "));
}

#[test]
fn password_is_read_from_a_file_and_is_not_in_debug_output() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    std::fs::write(&file, "hunter2\n").unwrap();
    let text = format!("url = 'redis://user@h'\npassword-file = '{}'\n", file.display());
    let config = Config::new().toml(&text, "simba.toml").unwrap();
    let settings = config.resolve().unwrap();
    assert_eq!(settings.url.password().unwrap().read().unwrap(), "hunter2");
    let environment = variables(&[("SIMBA_URL", "redis://user:hunter2@h"), ("SIMBA_PASSWORD", "hunter2")]);
    for debug in [format!("{config:?}"), format!("{settings:?}"), format!("{environment:?}")] {
        assert!(!debug.contains("hunter2"), "{debug}");
    }
}

#[test]
fn other_variables_are_ignored() {
    let config = variables(&[
        ("SIMBA_MUTEX", "orders"),
        ("SIMBA_CONTENDER_ID", "x"),
        ("SIMBA_FENCING_TOKEN", "7"),
        ("SIMBA_PORT", "tcp://10.0.0.1:80"),
        ("OTHER_TTL", "1s"),
        ("SIMBA_INITIAL_DELAY", "3s"),
    ]);
    assert_eq!(config.settings.len(), 1);
    let settings = config.resolve().unwrap();
    assert_eq!(settings.initial_delay.as_secs(), 3);
    assert_eq!(settings.unknown_variables, ["SIMBA_PORT"]);
}

#[test]
fn misspelt_variable_is_refused_even_if_the_correct_one_is_set() {
    let config =
        variables(&[("SIMBA_URL", "sqlite:a.db"), ("SIMBA_URI", "redis://canary")]).url("sqlite:b.db");
    let error = refusal(Ok(config));
    assert!(error.starts_with("the variable SIMBA_URI: ") && error.contains("SIMBA_URL"), "{error}");
    assert!(!error.contains("canary"), "{error}");
}

#[test]
fn format_of_a_file_is_selected_by_its_extension() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("a.toml", "ttl = '3s'\n"), ("a.yaml", "ttl: 3s\n"), ("a.yml", "ttl: 3s\n")] {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        assert_eq!(lease_of(&Config::new().file(&path).unwrap()).0, 3, "{name}");
    }
    assert!(refusal(Config::new().file(dir.path().join("absent.toml"))).contains("cannot read"));
}
