//! A terminal with its own session.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetpgrp, tcsetwinsize};

use super::{AT_MOST, World, tool, within};

/// The screen and the keyboard of a session.
#[derive(Debug)]
pub struct Pty {
    keys: File,
    seen: Arc<Mutex<String>>,
    child: Child,
}

impl Pty {
    /// Starts a program as the leader of a session with this terminal.
    pub fn start(world: &World, program: &[&str], columns: u16, env: &[(&str, &str)]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let name = PathBuf::from(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let open = || -> OwnedFd {
            rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let _ = tool("setsid");
        // As on a new terminal, no signal is ignored.
        let mut command = Command::new("env");
        command.args(["--default-signal", "setsid", "-c", "-w"]).args(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SIMBA_") {
                command.env_remove(name);
            }
        }
        command.env("HOME", world.dir.path()).env("XDG_STATE_HOME", world.path("state"));
        command.env("XDG_CONFIG_HOME", world.path("config")).env_remove("NO_COLOR").env("TERM", "xterm");
        command.env("SIMBA", env!("CARGO_BIN_EXE_simba")).env("ON", &world.url);
        command.envs(env.iter().copied()).current_dir(world.dir.path());
        command.stdin(Stdio::from(open())).stdout(Stdio::from(open())).stderr(Stdio::from(open()));
        let child = command.spawn().unwrap();
        // Closes this end of the terminal.
        drop(command);
        let seen = Arc::new(Mutex::new(String::new()));
        let keys = File::from(master);
        thread::spawn({
            let (mut screen, seen) = (keys.try_clone().unwrap(), Arc::clone(&seen));
            move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = screen.read(&mut bytes) {
                    seen.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            }
        });
        Self { keys, seen, child }
    }

    pub fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub fn seen(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    /// Waits until the screen shows the text.
    #[track_caller]
    pub fn shows(&self, text: &str) {
        let found = within(AT_MOST, || self.seen().contains(text).then_some(()));
        assert!(found.is_some(), "the screen does not show {text:?}:\n{}", self.seen());
    }

    /// Returns the foreground process group.
    pub fn foreground(&self) -> i32 {
        tcgetpgrp(&self.keys).unwrap().as_raw_nonzero().get()
    }

    /// Waits for the end. Returns the exit code.
    #[track_caller]
    pub fn wait(&mut self) -> i32 {
        let status = within(AT_MOST, || self.child.try_wait().unwrap());
        let status = status.unwrap_or_else(|| panic!("the session does not end:\n{}", self.seen()));
        status.code().unwrap_or(-1)
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
