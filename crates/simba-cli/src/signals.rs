//! The signals that `simba` passes on.

use std::io;
use std::task::Poll;

use rustix::process::{Signal as Number, WaitOptions, wait};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::broadcast;

/// All signals that a user or a service manager sends. The others are sent by the kernel, or stop the process.
const RELAYED: [Number; 10] = [
    Number::TERM,
    Number::INT,
    Number::HUP,
    Number::QUIT,
    Number::USR1,
    Number::USR2,
    Number::ALARM,
    Number::WINCH,
    Number::IO,
    Number::POWER,
];

/// The signals that ask a process to end, with their names.
const TERMINATING: [(Number, &str); 4] =
    [(Number::TERM, "SIGTERM"), (Number::INT, "SIGINT"), (Number::HUP, "SIGHUP"), (Number::QUIT, "SIGQUIT")];

/// Passes signals on to the command that is running. Does not keep them for a later command.
pub(crate) type Relay = broadcast::Sender<i32>;

/// Creates a relay without a receiver.
pub(crate) fn relay() -> Relay {
    broadcast::channel(16).0
}

/// A stream of signals.
#[derive(Debug)]
pub(crate) struct Signals {
    source: Source,
    /// The termination signals so far, in their order.
    termination_signals: Vec<i32>,
}

#[derive(Debug)]
enum Source {
    /// From the operating system.
    System(Vec<(i32, Signal)>),
    /// From the task that receives them first.
    Relayed(broadcast::Receiver<i32>),
}

impl Signals {
    /// Handles the signals from now on, so that they do not end this process, and reaps child processes.
    ///
    /// A signal that was ignored at the start stays ignored, for the command too, as `nohup` requires.
    pub(crate) fn listen() -> io::Result<Self> {
        tokio::spawn(reap(signal(SignalKind::child())?));
        Self::listen_without_reaping()
    }

    /// Handles signals like [`listen`](Self::listen), for callers that reap their own children.
    pub(crate) fn listen_without_reaping() -> io::Result<Self> {
        let ignored = ignored();
        let open = |number: Number| {
            let raw = number.as_raw();
            Ok((raw, signal(SignalKind::from_raw(raw))?))
        };
        let wanted = RELAYED.into_iter().filter(|number| ignored & (1 << (number.as_raw() - 1)) == 0);
        let streams = wanted.map(open).collect::<io::Result<_>>()?;
        Ok(Self { source: Source::System(streams), termination_signals: Vec::new() })
    }

    /// Returns the signals that the relay passes on from now.
    pub(crate) fn of(relay: &Relay) -> Self {
        Self { source: Source::Relayed(relay.subscribe()), termination_signals: Vec::new() }
    }

    /// Returns the termination signals so far, the first one first.
    pub(crate) fn termination_signals(&self) -> &[i32] {
        &self.termination_signals
    }

    /// Waits for the next signal.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing.
    pub(crate) async fn next(&mut self) -> i32 {
        let number = self.source.next().await;
        if is_terminating(number) && !self.termination_signals.contains(&number) {
            self.termination_signals.push(number);
        }
        number
    }

    /// Waits for the next termination signal.
    pub(crate) async fn termination(&mut self) -> i32 {
        loop {
            let number = self.next().await;
            if is_terminating(number) {
                return number;
            }
        }
    }

    /// Waits for the next termination signal; passes the others on.
    pub(crate) async fn termination_relaying(&mut self, relay: &Relay) -> i32 {
        loop {
            let number = self.next().await;
            if is_terminating(number) {
                return number;
            }
            let _ = relay.send(number);
        }
    }

    /// Passes all signals on until `done` completes.
    pub(crate) async fn relaying<T>(&mut self, relay: &Relay, done: impl Future<Output = T>) -> T {
        tokio::pin!(done);
        loop {
            tokio::select! {
                biased;
                done = &mut done => return done,
                number = self.next() => drop(relay.send(number)),
            }
        }
    }

    /// Returns a termination signal that has already arrived.
    pub(crate) async fn pending_termination(&mut self) -> Option<i32> {
        // The runtime checks for signals when it has no other work.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            number = self.termination() => Some(number),
            () = std::future::ready(()) => None,
        }
    }
}

/// Returns whether a signal asks to end.
fn is_terminating(number: i32) -> bool {
    TERMINATING.iter().any(|(terminating, _)| terminating.as_raw() == number)
}

/// Returns the name of a signal, or its number if it has none here.
pub(crate) fn name(number: i32) -> String {
    let known = TERMINATING.iter().find(|(signal, _)| signal.as_raw() == number);
    known.map_or_else(|| format!("signal {number}"), |(_, name)| (*name).to_owned())
}

impl Source {
    async fn next(&mut self) -> i32 {
        match self {
            Self::System(streams) => {
                std::future::poll_fn(|context| {
                    for (number, stream) in &mut *streams {
                        if stream.poll_recv(context).is_ready() {
                            return Poll::Ready(*number);
                        }
                    }
                    Poll::Pending
                })
                .await
            }
            Self::Relayed(signals) => loop {
                match signals.recv().await {
                    Ok(number) => return number,
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            },
        }
    }
}

/// Returns a mask of the signals that this process was started to ignore, the first in the lowest bit.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Reaps child processes: guards, processes that a dead guard left, and all orphans if this is the first process of
/// a container. The handler also keeps an ignored SIGCHLD from reaping them first.
async fn reap(mut exits: Signal) {
    while exits.recv().await.is_some() {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}
