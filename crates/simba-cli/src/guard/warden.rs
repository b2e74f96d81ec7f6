//! The guard as `simba` sees it.

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

use super::tree::{Spared, fell, is_in_sight};
use super::watch::WORD;
use super::wire::{Order, Report};
use crate::failure::{code, say};

/// How long what a dead guard left behind may take to be gone.
const REAPING: Duration = Duration::from_secs(2);

/// How long a guard that has said its last word may take to be gone.
const LEAVING: Duration = Duration::from_secs(1);

/// A command under guard.
///
/// Dropped before its time it ends the command and waits until nothing of it is left.
pub(crate) struct Warden {
    spared: Spared,
    /// Nothing of the command is left, or nothing more can be done about it.
    over: bool,
    reports: Lines<BufReader<OwnedReadHalf>>,
    orders: OwnedWriteHalf,
}

impl Warden {
    /// Starts the command under a guard. The terminal, if the command is to have it, is given back to the group
    /// `foreground`.
    ///
    /// # Errors
    ///
    /// The system gives no process.
    pub(crate) fn start(
        command: &[OsString],
        env: &[(&str, String)],
        foreground: Option<Pid>,
        until: Order,
    ) -> io::Result<Self> {
        if !is_in_sight() {
            return Err(io::Error::other(
                "/proc does not show the processes of this container: mount it anew",
            ));
        }
        // What a guard that is killed leaves behind becomes ours.
        set_child_subreaper(Some(getpid()))?;
        let (ours, theirs) = StdStream::pair()?;
        let spared = Spared::of_today(getpid());
        // Reaped with all the rest.
        let _guard: Child = Command::new("/proc/self/exe")
            .arg0("simba")
            .arg(WORD)
            .arg(foreground.map_or(0, |group| group.as_raw_nonzero().get()).to_string())
            .args(command)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        send_input(&ours, until)?;
        ours.set_nonblocking(true)?;
        let (reports, orders) = UnixStream::from_std(ours)?.into_split();
        Ok(Self { spared, over: false, reports: BufReader::new(reports).lines(), orders })
    }

    /// What the guard says next; `None` once it is gone.
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
    /// socket is full. A guard that is gone is noticed by the end of its reports.
    #[must_use]
    pub(crate) fn order(&self, order: Order) -> bool {
        let line = order.to_line();
        // Asks the kernel and not tokio, whose `try_write` refuses until the runtime has polled the socket once.
        let socket = self.orders.as_ref();
        loop {
            match send(socket, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => return sent == line.len(),
                Err(Errno::INTR) => {}
                Err(error) => return matches!(error, Errno::PIPE | Errno::CONNRESET),
            }
        }
    }

    /// Waits until a guard that has said its last word is gone, and keeps no file open any more.
    pub(crate) async fn dismiss(mut self) {
        self.over = true;
        let _ = within(&SystemClock, LEAVING, async { while self.report().await.is_some() {} }).await;
    }

    /// Leaves alone what cannot be ended.
    pub(crate) fn give_up(mut self) {
        self.over = true;
    }

    /// Ends the guard, should it still be there, and all that it leaves behind. False if something is left.
    pub(crate) fn clean_up(mut self) -> bool {
        self.fell()
    }

    fn fell(&mut self) -> bool {
        self.over = true;
        let spared = &self.spared;
        fell(getpid(), spared, REAPING, || {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) | Err(Errno::INTR) => {}
                    // Those who were there before are still there.
                    Ok(None) => return spared.are_alone(getpid()),
                    Err(_) => return true,
                }
            }
        })
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        if !self.over && !self.fell() {
            // Whoever drops us is about to free the mutex, and must not.
            say("the command left processes behind that cannot be ended: the mutex ends with its lease");
            std::process::exit(code::LOST.into());
        }
    }
}

/// Sends the command's standard input, which is ours, with the first order.
fn send_input(line: &StdStream, until: Order) -> io::Result<()> {
    let input = rustix::stdio::stdin();
    let fds = [input.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&fds));
    let text = until.to_line();
    sendmsg(line, &[IoSlice::new(text.as_bytes())], &mut rights, SendFlags::empty())?;
    Ok(())
}
