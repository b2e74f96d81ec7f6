//! No output contains a password, at any verbosity, wherever the URL was typed and however it is wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;

use common::{Finished, Running, World};

const CANARY: &str = "c4n4ry";

/// URLs with a canary in every position of a secret; most are unreachable, and the error is checked.
const URLS: [&str; 17] = [
    "redis://:c4n4ry@127.0.0.1:1",
    "redis://user:c4n4ry@127.0.0.1:1/0",
    "rediss://user:c4n4ry@127.0.0.1:1/0",
    "redis+cluster://user:c4n4ry@127.0.0.1:1,127.0.0.1:2",
    "redis+sentinel://user:c4n4ry@127.0.0.1:1/master/0?sentinel_password=c4n4ry",
    "mysql://user:c4n4ry@127.0.0.1:1/db",
    "mariadb://user:c4n4ry@127.0.0.1:1/db",
    "postgres://user:c4n4ry@127.0.0.1:1/db",
    "postgresql://user:c4n4ry@127.0.0.1:1/db?password=c4n4ry",
    "zookeeper://user:c4n4ry@127.0.0.1:1/chroot",
    "etcd://user:c4n4ry@127.0.0.1:1",
    "sqlite://user:c4n4ry@host/path",
    "gopher://user:c4n4ry@host/path",
    "postgres://user:c4n4ry@127.0.0.1:port/db",
    "postgres://user:c4n4ry@127.0.0.1:1/db?nonsense=1&secret_token=c4n4ry",
    "postgres://user:c4n4ry@[::1/db",
    "redis://user:c4n4ry%zz@127.0.0.1:1",
];

#[track_caller]
fn assert_no_secret(finished: &Finished, how: &str) {
    assert!(!finished.output_text().contains(CANARY), "{how}: {finished:?}");
}

#[test]
fn no_url_shows_its_password() {
    let world = World::new();
    for url in URLS {
        for verbosity in [&[][..], &["-v"], &["-vv"]] {
            let mut command = world.bare();
            command.args(verbosity).args([
                "--on",
                url,
                "run",
                "-n",
                "--ttl",
                "300ms",
                "--transition",
                "200ms",
            ]);
            command.args(["m", "--", "true"]);
            let finished = world.start(command).wait();
            assert_ne!(finished.code(), 0, "{url}");
            assert_no_secret(&finished, url);
        }
        let mut command = world.bare();
        command.env("SIMBA_URL", url).env("SIMBA_LOG", "trace").args(["doctor"]);
        assert_no_secret(&world.start(command).wait(), url);
    }
}

/// Every command that uses a store, and ends by itself if there is none.
const COMMANDS: [&[&str]; 13] = [
    &["run", "m", "--ttl", "300ms", "--transition", "200ms", "--", "true"],
    &["lead", "m", "--", "true"],
    &["schedule", "m", "--every", "1s", "--", "true"],
    &["status"],
    &["status", "m", "--json"],
    &["ls"],
    &["watch", "m"],
    &["release", "m", "--force", "--yes"],
    &["schema"],
    &["schema", "--apply"],
    &["doctor"],
    &["tck", "session"],
    &["bench", "--quick"],
];

#[test]
fn no_command_shows_a_password_at_any_verbosity() {
    let world = World::new();
    fs::write(world.path("secret"), CANARY).unwrap();
    let servers = ["redis", "mysql", "postgres", "zookeeper", "etcd"]
        .map(|scheme| format!("{scheme}://user@127.0.0.1:1/db"));
    for url in &servers {
        for args in COMMANDS {
            for verbosity in [&[][..], &["-v"], &["-vv"]] {
                // From a file, from the environment, and in the URL itself.
                let mut from_file = world.bare();
                from_file.env("SIMBA_URL", url).env("SIMBA_PASSWORD_FILE", world.path("secret"));
                let mut from_environment = world.bare();
                from_environment.env("SIMBA_URL", url).env("SIMBA_PASSWORD", CANARY);
                let mut typed = world.bare();
                typed
                    .args(["--on", &url.replace("user@", &format!("user:{CANARY}@"))])
                    .env("SIMBA_LOG", "trace");
                let running = [from_file, from_environment, typed].map(|mut command| {
                    command.args(verbosity).args(args);
                    world.start(command)
                });
                for finished in running.map(Running::wait) {
                    assert_ne!(finished.code(), 0, "{url} {args:?}: {finished:?}");
                    assert_no_secret(&finished, &format!("{url} {args:?}"));
                }
            }
        }
    }
}

#[test]
fn misplaced_url_shows_no_password() {
    let world = World::new();
    for url in URLS {
        for args in [
            &[url][..],
            &[url, "status"],
            &["status", url],
            &["run", url, "--", "true"],
            &["run", "-w", url, "m", "--", "true"],
            &["run", "--ttl", url, "m", "--", "true"],
            &["--on", url, "--nonsense"],
            &["--on", url, "--on", url, "status"],
            &["lead", url],
            &["release", "m", "--if-token", url],
            &["man", url],
            &["completions", url],
        ] {
            let mut command = world.bare();
            command.arg("-vv").args(args);
            assert_no_secret(&world.start(command).wait(), &format!("{args:?}"));
        }
    }
}

#[test]
fn guard_and_command_do_not_show_the_url() {
    let world = World::new();
    let url = format!("{}?password={CANARY}", world.url);
    let mut command = world.bare();
    command.args(["-vv", "--on", &url, "run", "m", "--", "true"]);
    assert_no_secret(&world.start(command).wait(), &url);
    // A valid store: the URL is in the process table only where it was typed.
    let script = "tr '\\0' ' ' < /proc/$PPID/cmdline; cat /proc/self/cmdline";
    let finished = world.run(&["run", "m", "--", "sh", "-c", script]).expect(0);
    assert!(!finished.out.contains(&world.url), "{finished:?}");
    fs::remove_file(world.path("store.db")).unwrap();
}

/// The password of a server that accepts it.
mod on_servers {
    use rustix::process::Signal;

    use super::*;
    use crate::common::until_true;

    fn assert_password_hidden(variable: &str) {
        let url = simba_servers::shared(variable);
        let password = url.split_once("://").unwrap().1.split_once('@').unwrap().0.split_once(':').unwrap().1;
        let world = World::on(&url);
        let ends =
            COMMANDS.iter().filter(|args| !["lead", "schedule", "watch", "tck", "bench"].contains(&args[0]));
        for args in ends {
            let finished = world.run(&[&["-vv"], *args].concat());
            assert!(!finished.output_text().contains(password), "{args:?}: {finished:?}");
        }
        for args in [&["lead", "m", "--", "touch", "led"][..], &["watch", "m"]] {
            let mut running = world.spawn(&[&["-vv"], args].concat());
            until_true("output", || running.err().lines().count() + running.out().lines().count() > 1);
            running.signal(Signal::TERM);
            running.status();
            let text = running.out() + &running.err();
            assert!(!text.contains(password), "{args:?}: {text}");
        }
    }

    #[test]
    fn postgres_password_is_shown_nowhere() {
        assert_password_hidden("SIMBA_TCK_POSTGRES");
    }

    #[test]
    fn mysql_password_is_shown_nowhere() {
        assert_password_hidden("SIMBA_TCK_MARIADB");
    }
}
