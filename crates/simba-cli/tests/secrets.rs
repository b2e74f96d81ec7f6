//! A password is in no output, at any verbosity, wherever the URL was typed and however it is wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;

use common::{Finished, World};

const CANARY: &str = "c4n4ry";

/// URLs with a canary wherever a secret may stand; most lead nowhere, and that is what is told.
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
fn assert_silent(told: &Finished, how: &str) {
    assert!(!told.said().contains(CANARY), "{how}: {told:?}");
}

#[test]
fn no_url_tells_its_password() {
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
            let told = world.start(command).wait();
            assert_ne!(told.code(), 0, "{url}");
            assert_silent(&told, url);
        }
        let mut command = world.bare();
        command.env("SIMBA_URL", url).env("SIMBA_LOG", "trace").args(["doctor"]);
        assert_silent(&world.start(command).wait(), url);
    }
}

#[test]
fn a_url_in_the_wrong_place_tells_none_either() {
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
            assert_silent(&world.start(command).wait(), &format!("{args:?}"));
        }
    }
}

#[test]
fn the_helpers_of_the_command_do_not_show_the_url() {
    let world = World::new();
    let url = format!("{}?password={CANARY}", world.url);
    let mut command = world.bare();
    command.args(["-vv", "--on", &url, "run", "m", "--", "true"]);
    assert_silent(&world.start(command).wait(), &url);
    // A store that takes it: what stands in the table of processes is what was typed, and nowhere else.
    let script = "tr '\\0' ' ' < /proc/$PPID/cmdline; cat /proc/self/cmdline";
    let told = world.run(&["run", "m", "--", "sh", "-c", script]).expect(0);
    assert!(!told.out.contains(&world.url), "{told:?}");
    fs::remove_file(world.path("store.db")).unwrap();
}
