//! An error is printed in one line, has a documented exit code, and leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::process::Command;

use common::{World, tool};

#[test]
fn unwritable_output_exits_with_74() {
    let world = World::new();
    for args in
        [&["ls"][..], &["status", "m", "--json"], &["man"], &["schema"], &["doctor"], &["completions", "zsh"]]
    {
        let mut command = world.simba(args);
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        command.stdout(full).stderr(File::create(world.path("err")).unwrap());
        let status = command.status().unwrap();
        assert_eq!(status.code(), Some(74), "{args:?}: {}", world.read("err"));
        assert_eq!(world.read("err").lines().count(), 1, "{args:?}: {}", world.read("err"));
    }
}

#[test]
fn unwritable_stderr_does_not_change_the_exit_code() {
    let world = World::new();
    for (args, code) in [(&["run", "m", "--", "nothing-like-it"][..], 127), (&["run", "", "--", "true"], 2)] {
        for verbosity in ["-q", "-vv"] {
            let mut command = world.simba(&[]);
            if verbosity == "-vv" {
                command.arg(verbosity);
            }
            let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
            let status = command.args(args).stderr(full).status().unwrap();
            assert_eq!(status.code(), Some(code), "{args:?} {verbosity}");
        }
    }
}

/// A separate file system without free space.
struct Full {
    world: World,
}

impl Full {
    fn new() -> Self {
        let world = World::new();
        fs::create_dir(world.path("full")).unwrap();
        let mut mount = tool("mount");
        mount.args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(world.path("full"));
        assert!(mount.status().unwrap().success(), "this test mounts a small file system: run it as root");
        Self { world }
    }

    fn fill(&self) {
        // Fails once the file system is full.
        let _ = fs::write(self.world.path("full/filler"), vec![7; 1 << 20]);
    }

    fn simba(&self, args: &[&str]) -> Command {
        let url = format!("sqlite:{}", self.world.path("full/store.db").display());
        let mut command = self.world.bare();
        command.args(["--on", &url]).args(args);
        command
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.world.path("full")).status();
    }
}

#[test]
fn impossible_paths_are_reported_in_one_line() {
    let world = World::new();
    fs::write(world.path("file"), "").unwrap();
    for path in ["file/store.db", "/proc/store.db", "/dev/null", "/"] {
        let mut command = world.bare();
        command.args(["--on", &format!("sqlite:{path}"), "run", "m", "--", "touch", "started"]);
        let refused = world.start(command).wait();
        assert!([69, 76, 77, 78].contains(&refused.code()), "{path}: {refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{path}: {refused:?}");
    }
    assert!(!world.path("started").exists());
}

#[test]
fn verbose_errors_print_their_causes() {
    let world = World::new();
    fs::write(world.path("store.db"), "this is no database, and it is long enough to be recognized").unwrap();
    let short = world.run(&["ls"]);
    let long = world.run(&["-v", "ls"]);
    assert_eq!(short.code(), long.code());
    assert_eq!(short.err.lines().count(), 1, "{short:?}");
    assert!(long.err.contains("caused by"), "{long:?}");
}

#[test]
fn refused_command_leaves_no_process() {
    let world = World::new();
    for args in [&["run", "m", "--", "nothing-like-it"][..], &["run", "", "--", "true"], &["ls"]] {
        let mut running = world.spawn(args);
        running.status();
        running.assert_nothing_left();
    }
}

/// Tests that mount a file system or switch to another user.
mod as_root {
    use super::*;

    #[test]
    fn full_disk_is_reported_in_one_line_and_starts_nothing() {
        let full = Full::new();
        full.fill();
        let run =
            full.simba(&["run", "--ttl", "500ms", "--transition", "250ms", "m", "--", "touch", "started"]);
        let refused = full.world.start(run).wait();
        assert_eq!(refused.code(), 69, "{refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        assert!(refused.err.contains("full"), "{refused:?}");
        assert!(!full.world.path("started").exists());
        // Recovers by itself once there is space.
        fs::remove_file(full.world.path("full/filler")).unwrap();
        full.world.start(full.simba(&["run", "m", "--", "sh", "-c", "exit 12"])).wait().expect(12);
    }

    #[test]
    fn process_limit_is_reported_in_one_line() {
        let world = World::new();
        let _ = tool("prlimit");
        fs::copy(env!("CARGO_BIN_EXE_simba"), world.path("simba")).unwrap();
        std::os::unix::fs::chown(world.dir.path(), Some(61_234), None).unwrap();
        let mut command = tool("setpriv");
        command.args(["--reuid=61234", "--clear-groups", "--", "prlimit", "--nproc=1", "--"]);
        command.arg(world.path("simba")).args(["--on", &world.url, "run", "m", "--", "touch", "started"]);
        command.env("HOME", world.dir.path()).env_remove("XDG_CONFIG_HOME").current_dir(world.dir.path());
        let refused = world.start(command).wait();
        assert!([69, 126].contains(&refused.code()), "{refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        assert!(!world.path("started").exists());
    }
}
