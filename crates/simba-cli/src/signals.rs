//! The signals that `simba` passes on.

use std::io;
use std::task::Poll;

use rustix::process::{Signal as Number, WaitOptions, wait};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::broadcast;

/// All that a person or a service manager sends. The rest is the kernel's, or stops.
const PASSED_ON: [Number; 10] = [
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

/// Those that ask to end.
const ENDING: [Number; 4] = [Number::TERM, Number::INT, Number::HUP, Number::QUIT];

/// Where signals are passed on to whichever command runs. None are kept for a later one.
pub(crate) type Relay = broadcast::Sender<i32>;

/// A relay that nobody listens to yet.
pub(crate) fn relay() -> Relay {
    broadcast::channel(16).0
}

/// Signals as they come.
#[derive(Debug)]
pub(crate) enum Signals {
    /// From the system.
    Heard(Vec<(i32, Signal)>),
    /// From who heard them first.
    Relayed(broadcast::Receiver<i32>),
}

impl Signals {
    /// From here on no such signal ends this process, and what ends below it is reaped.
    ///
    /// A signal that was ignored from the start stays so, for the command too: `nohup` means both.
    pub(crate) fn listen() -> io::Result<Self> {
        tokio::spawn(reap(signal(SignalKind::child())?));
        Self::hear()
    }

    /// As [`listen`](Self::listen), for who reaps its own children.
    pub(crate) fn hear() -> io::Result<Self> {
        let ignored = ignored();
        let open = |number: Number| {
            let raw = number.as_raw();
            Ok((raw, signal(SignalKind::from_raw(raw))?))
        };
        let wanted = PASSED_ON.into_iter().filter(|number| ignored & (1 << (number.as_raw() - 1)) == 0);
        Ok(Self::Heard(wanted.map(open).collect::<io::Result<_>>()?))
    }

    /// The next one.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing.
    pub(crate) async fn next(&mut self) -> i32 {
        match self {
            Self::Heard(streams) => {
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
            Self::Relayed(heard) => loop {
                match heard.recv().await {
                    Ok(number) => return number,
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            },
        }
    }

    /// The next one that asks to end.
    pub(crate) async fn end(&mut self) -> i32 {
        loop {
            let number = self.next().await;
            if asks_to_end(number) {
                return number;
            }
        }
    }

    /// The next one that asks to end; the others are passed on.
    pub(crate) async fn end_relaying(&mut self, relay: &Relay) -> i32 {
        loop {
            let number = self.next().await;
            if asks_to_end(number) {
                return number;
            }
            let _ = relay.send(number);
        }
    }

    /// Passes all of them on until something is done.
    pub(crate) async fn relaying<T>(&mut self, relay: &Relay, done: impl Future<Output = T>) -> T {
        tokio::pin!(done);
        loop {
            tokio::select! {
                biased;
                number = self.next() => drop(relay.send(number)),
                done = &mut done => return done,
            }
        }
    }

    /// One that asks to end and is here already.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        // A signal is heard only when the runtime looks, and it looks when it has nothing else to do.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            number = self.end() => Some(number),
            () = std::future::ready(()) => None,
        }
    }
}

/// Whether a signal asks to end.
fn asks_to_end(number: i32) -> bool {
    ENDING.iter().any(|ending| ending.as_raw() == number)
}

/// The signals that this process was started to ignore, the first in the lowest bit.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Reaps what ends below us: guards, what a dead guard left behind, and everybody's orphans if we are the first
/// process of a container. The handler also keeps an ignored SIGCHLD from reaping behind our back.
async fn reap(mut deaths: Signal) {
    while deaths.recv().await.is_some() {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}
