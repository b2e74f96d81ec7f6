//! An etcd on its own, and three that agree.

#![allow(clippy::unwrap_used)]

mod on_servers {
    use std::path::{Path, PathBuf};
    use std::process::{self, Command};
    use std::time::{Duration, Instant};
    use std::{env, fs, thread};

    use simba_servers::{Certificates, Ensemble, Server, Setup};

    const PATIENCE: Duration = Duration::from_secs(30);

    /// What `etcdctl` says, if it succeeds.
    fn ctl(at: &str, words: &[&str]) -> Option<String> {
        let url = at.replacen("etcd", "http", 1);
        let output = Command::new("etcdctl").args(["--endpoints", &url]).args(words).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// A directory for one test, removed with all that is in it.
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

    fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(seen) = look() {
                return seen;
            }
            assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn it_comes_back_with_its_data() {
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
    fn a_lease_may_be_as_short_as_a_second_and_a_setting_changes_that() {
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
    fn one_that_is_full_comes_back_too() {
        let mut server = Setup::etcd().with_setting("--quota-backend-bytes=65536").start().unwrap();
        let value = "x".repeat(4096);
        wait_for("an end of its room", || {
            ctl(&server.url(), &["put", "key", &value]).is_none().then_some(())
        });
        server.restart().unwrap();
        assert!(ctl(&server.url(), &["alarm", "list"]).unwrap().contains("NOSPACE"));
    }

    #[test]
    fn it_speaks_tls_and_asks_for_certificates_if_told() {
        let scratch = Scratch::new("alone");
        let certificates = Certificates::create(&scratch.0).unwrap();
        let file = |name| certificates.path(name).display().to_string();
        let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
        let anybody = ["get", "key", "--command-timeout=2s", "--cacert", &ca];
        let known = [&anybody[..], &["--cert", &cert, "--key", &key]].concat();
        let open = Setup::etcd().with_tls(&certificates);
        let strict = open.clone().with_setting("--client-cert-auth").with_setting("--trusted-ca-file=ca.pem");
        let seen = [open, strict].map(|setup| {
            let server = setup.start().unwrap();
            let (url, plain) = (server.url(), server.address().to_string());
            [ctl(&url, &anybody), ctl(&url, &known), ctl(&plain, &anybody[..3])].map(|said| said.is_some())
        });
        assert_eq!(seen, [[true, true, false], [false, true, false]]);
    }

    #[test]
    fn a_cluster_speaks_tls_if_its_members_do() {
        let scratch = Scratch::new("cluster");
        let certificates = Certificates::create(&scratch.0).unwrap();
        let cluster = Ensemble::start_etcd_with(|_, member| member.with_tls(&certificates)).unwrap();
        let port = |at| cluster.server(at).address().port();
        let expected = format!("etcds://localhost:{},localhost:{},localhost:{}", port(0), port(1), port(2));
        assert_eq!(cluster.url(), expected);
        wait_for("a leader", || cluster.leader().ok());
        let ca = certificates.path("ca.pem").display().to_string();
        wait_for("a read", || ctl(&cluster.server(2).url(), &["get", "key", "--cacert", &ca]));
    }

    #[test]
    fn a_cluster_outlives_its_leader_which_comes_back_with_its_data() {
        let mut cluster = Ensemble::start_etcd().unwrap();
        let url = cluster.url();
        assert_eq!(url.split(',').count(), 3, "{url}");
        assert!((0..3).all(|at| url.contains(&cluster.server(at).address().to_string())), "{url}");
        for how in [Server::kill, Server::stop] {
            let old = wait_for("a leader", || cluster.leader().ok());
            how(cluster.server_mut(old)).unwrap();
            let other = wait_for("another leader", || cluster.leader().ok());
            assert_ne!(other, old);
            let value = format!("without-{old}");
            wait_for("a write", || ctl(&cluster.server(other).url(), &["put", "key", &value]));
            cluster.server_mut(old).restart().unwrap();
            let got = wait_for("a read", || ctl(&cluster.server(old).url(), &["get", "key"]));
            assert!(got.contains(&value), "{got}");
        }
    }

    #[test]
    fn a_leader_that_stands_still_is_followed_no_longer() {
        let cluster = Ensemble::start_etcd().unwrap();
        let old = wait_for("a leader", || cluster.leader().ok());
        cluster.server(old).pause().unwrap();
        wait_for("another leader", || cluster.leader().ok().filter(|leader| *leader != old));
        cluster.server(old).resume().unwrap();
        wait_for("a read of who stood still", || ctl(&cluster.server(old).url(), &["get", "key"]));
    }

    #[test]
    fn nothing_is_left_of_a_cluster() {
        let cluster = Ensemble::start_etcd().unwrap();
        let servers = (0..3).map(|at| cluster.server(at));
        let left: Vec<_> =
            servers.map(|server| (server.dir().to_owned(), format!("/proc/{}", server.pid()))).collect();
        drop(cluster);
        assert!(left.iter().all(|(dir, process)| !dir.exists() && !Path::new(process).exists()));
    }
}
