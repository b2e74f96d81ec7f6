//! A standalone etcd, and a cluster of three.

#![allow(clippy::unwrap_used)]

mod on_servers {
    use std::path::{Path, PathBuf};
    use std::process::{self, Command};
    use std::time::{Duration, Instant};
    use std::{env, fs, thread};

    use simba_servers::{Certificates, Ensemble, Server, Setup};

    const LIMIT: Duration = Duration::from_secs(60);

    /// Returns the output of `etcdctl`, if it succeeds.
    fn ctl(at: &str, words: &[&str]) -> Option<String> {
        let url = at.replacen("etcd", "http", 1);
        let mut command = Command::new("etcdctl");
        // The last of repeated flags wins.
        command.args(["--endpoints", &url, "--command-timeout=20s"]).args(words);
        let output = command.output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// A directory for one test, removed with its content.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Self(env::temp_dir().join(format!("simba-servers-etcd-{}-{name}", process::id())))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn wait_for<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(value) = check() {
                return value;
            }
            assert!(begun.elapsed() < LIMIT, "no {what} within {LIMIT:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn restart_keeps_the_data() {
        let mut server = Setup::etcd().start().unwrap();
        ctl(&server.url(), &["put", "key", "value"]).unwrap();
        server.restart().unwrap();
        assert!(ctl(&server.url(), &["get", "key"]).unwrap().contains("value"));
        server.kill().unwrap();
        assert_eq!(ctl(&server.url(), &["get", "key", "--command-timeout=200ms"]), None);
        server.restart().unwrap();
        assert!(ctl(&server.url(), &["get", "key"]).unwrap().contains("value"));
    }

    #[test]
    fn shortest_lease_is_one_second_and_depends_on_a_setting() {
        let granted = |setup: Setup| {
            let server = setup.start().unwrap();
            ctl(&server.url(), &["lease", "grant", "1"]).unwrap()
        };
        let short = granted(Setup::etcd());
        assert!(short.contains("TTL(1s)"), "{short}");
        let long = granted(Setup::etcd().with_setting("--election-timeout=1000"));
        assert!(long.contains("TTL(2s)"), "{long}");
    }

    #[test]
    fn server_without_space_restarts() {
        let mut server = Setup::etcd().with_setting("--quota-backend-bytes=65536").start().unwrap();
        let value = "x".repeat(4096);
        wait_for("full database", || ctl(&server.url(), &["put", "key", &value]).is_none().then_some(()));
        server.restart().unwrap();
        assert!(ctl(&server.url(), &["alarm", "list"]).unwrap().contains("NOSPACE"));
    }

    #[test]
    fn tls_is_enabled_and_client_certificates_are_optional() {
        let scratch = Scratch::new("alone");
        let certificates = Certificates::create(&scratch.0).unwrap();
        let file = |name| certificates.path(name).display().to_string();
        let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
        let anonymous = ["get", "key", "--cacert", &ca];
        let with_certificate = [&anonymous[..], &["--cert", &cert, "--key", &key]].concat();
        // It retries until its timeout.
        let refused =
            |at: &str, words: &[&str]| ctl(at, &[words, &["--command-timeout=2s"]].concat()).is_none();
        let open = Setup::etcd().with_tls(&certificates);
        let strict = open.clone().with_setting("--client-cert-auth").with_setting("--trusted-ca-file=ca.pem");
        for (setup, is_strict) in [(open, false), (strict, true)] {
            let server = setup.start().unwrap();
            let (url, plain) = (server.url(), server.address().to_string());
            assert!(ctl(&url, &with_certificate).is_some(), "strict: {is_strict}");
            assert!(if is_strict { refused(&url, &anonymous) } else { ctl(&url, &anonymous).is_some() });
            assert!(refused(&plain, &["get", "key"]), "strict: {is_strict}");
        }
    }

    #[test]
    fn cluster_has_tls_if_its_members_do() {
        let scratch = Scratch::new("cluster");
        let certificates = Certificates::create(&scratch.0).unwrap();
        let cluster = Ensemble::start_etcd_with(|_, member| member.with_tls(&certificates)).unwrap();
        let port = |at| cluster.server(at).address().port();
        let expected = format!("etcds://localhost:{},localhost:{},localhost:{}", port(0), port(1), port(2));
        assert_eq!(cluster.url(), expected);
        wait_for("leader", || cluster.leader().ok());
        let ca = certificates.path("ca.pem").display().to_string();
        wait_for("read", || ctl(&cluster.server(2).url(), &["get", "key", "--cacert", &ca]));
    }

    #[test]
    fn cluster_survives_its_leader_which_restarts_with_its_data() {
        let mut cluster = Ensemble::start_etcd().unwrap();
        let url = cluster.url();
        assert_eq!(url.split(',').count(), 3, "{url}");
        assert!((0..3).all(|at| url.contains(&cluster.server(at).address().to_string())), "{url}");
        for how in [Server::kill, Server::stop] {
            let old = wait_for("leader", || cluster.leader().ok());
            how(cluster.server_mut(old)).unwrap();
            let other = wait_for("other leader", || cluster.leader().ok());
            assert_ne!(other, old);
            let value = format!("without-{old}");
            wait_for("write", || ctl(&cluster.server(other).url(), &["put", "key", &value]));
            cluster.server_mut(old).restart().unwrap();
            let got = wait_for("read", || ctl(&cluster.server(old).url(), &["get", "key"]));
            assert!(got.contains(&value), "{got}");
        }
    }

    #[test]
    fn paused_leader_is_replaced() {
        let cluster = Ensemble::start_etcd().unwrap();
        let old = wait_for("leader", || cluster.leader().ok());
        cluster.server(old).pause().unwrap();
        wait_for("other leader", || cluster.leader().ok().filter(|leader| *leader != old));
        cluster.server(old).resume().unwrap();
        wait_for("read from the paused member", || ctl(&cluster.server(old).url(), &["get", "key"]));
    }

    #[test]
    fn dropped_cluster_leaves_nothing() {
        let cluster = Ensemble::start_etcd().unwrap();
        let servers = (0..3).map(|at| cluster.server(at));
        let left: Vec<_> =
            servers.map(|server| (server.dir().to_owned(), format!("/proc/{}", server.pid()))).collect();
        drop(cluster);
        assert!(left.iter().all(|(dir, process)| !dir.exists() && !Path::new(process).exists()));
    }
}
