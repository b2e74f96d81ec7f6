//! The side of `simba`: starts the guard, sends orders, receives reports.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, wait};
use simba_mutex::SystemClock;
use simba_mutex::clock::within;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::process::SUBCOMMAND;
use super::protocol::{Order, Report};
use super::tree::{Excluded, is_proc_usable, kill_all};
use crate::failure::exit_with_leftover_processes;

/// Time limit for the end of processes that a dead guard left behind. A busy machine needs seconds for a large tree.
const REAP_LIMIT: Duration = Duration::from_secs(2);

/// Time limit for the exit of a guard after its last report.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

/// A command under a guard.
///
/// A drop before the end kills the command and waits until none of its processes is left.
pub(crate) struct GuardHandle {
    excluded: Excluded,
    /// No process of the command is left, or the rest cannot be killed.
    done: bool,
    reports: Lines<BufReader<OwnedReadHalf>>,
    orders: OwnedWriteHalf,
}

impl GuardHandle {
    /// Starts the command under a guard. If the command gets the terminal, it is given back to the group `foreground`.
    ///
    /// # Errors
    ///
    /// A process cannot be started.
    pub(crate) fn start(
        command: &[OsString],
        env: &[(&str, String)],
        foreground: Option<Pid>,
        until: Order,
    ) -> io::Result<Self> {
        if !is_proc_usable() {
            return Err(io::Error::other(
                "/proc does not show the processes of this container: mount it again",
            ));
        }
        // Processes that a killed guard leaves behind become our children.
        set_child_subreaper(Some(getpid()))?;
        let (ours, theirs) = StdStream::pair()?;
        let excluded = Excluded::children_of(getpid());
        // Reaped with all other children.
        let _guard: Child = Command::new("/proc/self/exe")
            .arg0("simba")
            .arg(SUBCOMMAND)
            .arg(foreground.map_or(0, |group| group.as_raw_nonzero().get()).to_string())
            .args(command)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        send_input(&ours, until)?;
        ours.set_nonblocking(true)?;
        let (reports, orders) = UnixStream::from_std(ours)?.into_split();
        Ok(Self { excluded, done: false, reports: BufReader::new(reports).lines(), orders })
    }

    /// Waits for the next report of the guard. Returns `None` once the guard is gone.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing.
    pub(crate) async fn report(&mut self) -> Option<Report> {
        loop {
            match self.reports.next_line().await {
                Ok(Some(line)) => match Report::parse(&line) {
                    Some(report) => return Some(report),
                    None => continue,
                },
                _ => return None,
            }
        }
    }

    /// Sends an order without waiting. Returns false if it cannot be sent: the guard has stopped reading, and the
    /// socket is full. A guard that is gone is detected by the end of its reports.
    #[must_use]
    pub(crate) fn order(&self, order: Order) -> bool {
        let line = order.to_line();
        // Calls the kernel directly: tokio's `try_write` fails until the runtime has polled the socket once.
        let socket = self.orders.as_ref();
        loop {
            match send(socket, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => return sent == line.len(),
                Err(Errno::INTR) => {}
                Err(error) => return matches!(error, Errno::PIPE | Errno::CONNRESET),
            }
        }
    }

    /// Waits until a guard that has sent its last report is gone and has closed its files.
    pub(crate) async fn wait_for_exit(mut self) {
        self.done = true;
        let _ = within(&SystemClock, EXIT_LIMIT, async { while self.report().await.is_some() {} }).await;
    }

    /// Leaves the remaining processes running.
    pub(crate) fn abandon(mut self) {
        self.done = true;
    }

    /// Kills the guard, if it still runs, and all processes that it leaves behind. Returns false if some are left.
    pub(crate) fn kill_tree(mut self) -> bool {
        self.kill()
    }

    fn kill(&mut self) -> bool {
        self.done = true;
        let excluded = &self.excluded;
        kill_all(getpid(), excluded, REAP_LIMIT, || {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) | Err(Errno::INTR) => {}
                    // Only the excluded processes may be left.
                    Ok(None) => return excluded.no_others_alive(getpid()),
                    Err(_) => return true,
                }
            }
        })
    }
}

impl Drop for GuardHandle {
    fn drop(&mut self) {
        if !self.done && !self.kill() {
            // A return would let the caller free the mutex.
            exit_with_leftover_processes();
        }
    }
}

/// Sends the standard input of the command, which is our own, with the first order.
fn send_input(socket: &StdStream, until: Order) -> io::Result<()> {
    let input = rustix::stdio::stdin();
    let fds = [input.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&fds));
    let text = until.to_line();
    sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut rights, SendFlags::empty())?;
    Ok(())
}
