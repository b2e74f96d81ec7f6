//! One connection for the commands of all sessions. Commands are pipelined: replies come in the order of the requests.
//!
//! This is a client of our own because redis-rs can hand a reply to the wrong caller after it has subscribed again: a
//! mutex would count as acquired by the reply to another call. Here every request adds an entry to a queue, and every
//! reply takes the oldest entry, whether its caller still waits or not. Calls are batched here rather than by
//! `simba_net::batch`, which holds calls back while requests are in flight: requests to Redis are pipelined, and a call
//! is encoded once, into the bytes of its batch.
//!
//! | module | role |
//! |---|---|
//! | this one | the handle that callers use |
//! | [`outbox`] | requests that are not sent, and requests without a reply |
//! | [`io`] | the task of the connection: writes, reads, detects silence, reads the server's clock |
//! | [`batch`] | calls that are sent as one command |
//! | [`spread`] | the probe that shows whether calls may be batched |

mod batch;
mod io;
mod outbox;
pub(crate) mod spread;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use simba_core::{Error, Result};
use simba_net::supervise::Connection;
use tokio::sync::{Notify, oneshot};

use crate::error;
use crate::resp::{self, Reply};
use crate::scripts::{FastPath, Invocation, Script, Scripts};
pub(crate) use io::CloseOnDrop;
use outbox::{Expected, Outbox, Probe};
use spread::{Spread, Verdict};

/// Handle to one connection. Clones are cheap.
#[derive(Clone)]
pub(crate) struct Pipeline {
    inner: Arc<Inner>,
}

struct Inner {
    outbox: Mutex<Outbox>,
    output_ready: Notify,
    /// Notified for the first deferred command.
    deferred_ready: Notify,
    /// Notified when the connection is closed.
    closed: Notify,
}

/// The caller that waits for a reply, or `None` if the reply is ignored.
type ReplySender = Option<oneshot::Sender<Reply>>;

impl Pipeline {
    pub(crate) fn new(spread: Arc<Spread>) -> Self {
        let inner = Inner {
            outbox: Mutex::new(Outbox::new(spread)),
            output_ready: Notify::new(),
            deferred_ready: Notify::new(),
            closed: Notify::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Sends a probe for keys that are spread over servers. Its reply decides whether calls may be batched.
    pub(crate) fn probe_spread(&self) {
        let Ok(mut outbox) = self.open_outbox() else { return };
        let (writes, read) = spread::commands();
        for write in writes {
            outbox.add(Expected::One(None), |out| out.extend_from_slice(&write));
        }
        outbox.add(Expected::SpreadProbe, |out| out.extend_from_slice(&read));
        outbox.probe = Probe::Sent;
        drop(outbox);
        self.inner.output_ready.notify_one();
    }

    /// Returns whether a probe has no reply yet. Stays true if the connection ended before the reply.
    pub(crate) fn is_probing(&self) -> bool {
        self.outbox().probe == Probe::Sent
    }

    /// Sends a command and waits for its reply, which may be an error reply.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the command is still sent and its reply is ignored.
    pub(crate) async fn call(&self, command: &[&str]) -> Result<Reply> {
        self.call_with(|out| resp::write_command(out, command)).await
    }

    /// Like [`call`](Self::call), with the one command that `write` writes.
    pub(crate) async fn call_with(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<Reply> {
        let (sender, reply) = oneshot::channel();
        self.push(self.open_outbox()?, Some(sender), write);
        reply.await.map_err(|_| self.cause())
    }

    /// Sends `first` directly followed by the command that `write` writes, and waits for the reply to the latter.
    pub(crate) async fn call_after(&self, first: &[&str], write: impl FnOnce(&mut Vec<u8>)) -> Result<Reply> {
        let (sender, reply) = oneshot::channel();
        {
            let mut outbox = self.open_outbox()?;
            outbox.add(Expected::One(None), |out| resp::write_command(out, first));
            outbox.add(Expected::One(Some(sender)), write);
        }
        self.inner.output_ready.notify_one();
        reply.await.map_err(|_| self.cause())
    }

    /// Sends the command that `write` writes and ignores its reply. Does nothing if the connection is broken.
    pub(crate) fn send(&self, write: impl FnOnce(&mut Vec<u8>)) {
        if let Ok(outbox) = self.open_outbox() {
            self.push(outbox, None, write);
        }
    }

    /// Sends a script call, alone or in a batch, and waits for its reply. Returns `Nil` if the batch did not execute
    /// the call and the caller has to repeat it alone: the fast path did not apply, or the batch failed as a whole.
    ///
    /// # Cancel safety
    ///
    /// As [`call`](Self::call), but a call that would have to be repeated alone may not be executed.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>, scripts: &Scripts) -> Result<Reply> {
        let (sender, reply) = oneshot::channel();
        self.enqueue(call, scripts, Some(sender))?;
        reply.await.map_err(|_| self.cause())
    }

    fn enqueue(&self, call: &Invocation<'_>, scripts: &Scripts, sender: ReplySender) -> Result<()> {
        let mut outbox = self.open_outbox()?;
        // A renewal is sent long before the deadline, so it can wait a few milliseconds for a batch. Other calls have a
        // waiting caller.
        let deferred = matches!(call.fast_path, Some(FastPath::Renew(..)));
        let (first, at_once) = (outbox.is_empty(), !deferred && outbox.is_quiet());
        let may_batch = !at_once && outbox.probe == Probe::Answered(Verdict::OneServer);
        let sent = match (&call.fast_path, scripts.digest(Script::Many)) {
            (Some(path), Some(digest)) if may_batch => outbox.append(path, call.mutex, digest, sender),
            _ => {
                outbox.add(Expected::One(sender), |out| call.write(out, scripts));
                at_once && outbox.send()
            }
        };
        drop(outbox);
        match deferred {
            _ if sent => {}
            false => self.inner.output_ready.notify_one(),
            true if first => self.inner.deferred_ready.notify_one(),
            // The first deferred command has notified the writer.
            true => {}
        }
        Ok(())
    }

    /// Waits until replicas have the writes of this connection whose replies the caller has, or the time of `command`,
    /// which is a `WAIT`, is over. Returns the reply: the number of replicas.
    ///
    /// The server answers nothing else on the connection during a `WAIT`, so there is one at a time for all callers.
    pub(crate) async fn wait_for_replicas(&self, command: &[&str]) -> Result<Reply> {
        let (sender, reply) = oneshot::channel();
        self.open_outbox()?.wait_for_replicas(command, sender);
        self.inner.output_ready.notify_one();
        reply.await.map_err(|_| self.cause())
    }

    fn push(
        &self,
        mut outbox: MutexGuard<'_, Outbox>,
        sender: ReplySender,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let quiet = outbox.is_quiet();
        outbox.add(Expected::One(sender), write);
        if !(quiet && outbox.send()) {
            drop(outbox);
            self.inner.output_ready.notify_one();
        }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.inner.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_outbox(&self) -> Result<MutexGuard<'_, Outbox>> {
        let outbox = self.outbox();
        match outbox.refusal() {
            Some(cause) => Err(cause),
            None => Ok(outbox),
        }
    }

    /// Closes the connection. All outstanding and later calls fail with the first cause. The connection is reset if calls
    /// are in flight, unless the handle was closed: then its task sends what is queued.
    pub(crate) fn close_with(&self, cause: Error) {
        let outstanding = self.outbox().close(cause);
        // After the lock is released: a woken caller takes it.
        drop(outstanding);
        self.inner.closed.notify_one();
    }

    fn cause(&self) -> Error {
        self.outbox().broken.clone().unwrap_or_else(error::disconnected)
    }
}

impl Connection for Pipeline {
    fn is_open(&self) -> bool {
        self.outbox().broken.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use simba_core::TokioClock;
    use simba_net::ServerClock;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;
    use crate::config::RedisConfig;
    use crate::connection::Transport;
    use crate::supervisor::Context;

    /// Reads the next command and returns its name, or `None` at the end of the connection.
    async fn next_command(server: &mut DuplexStream, buffer: &mut Vec<u8>) -> Option<String> {
        loop {
            if let Some((command, length)) = resp::parse(buffer).unwrap() {
                buffer.drain(..length);
                return Some(command.array().unwrap()[0].text().unwrap().into());
            }
            if server.read_buf(buffer).await.unwrap() == 0 {
                return None;
            }
        }
    }

    /// Runs a connection, and returns the other end of it.
    fn run() -> (Pipeline, DuplexStream) {
        let config = RedisConfig::from_url(&"redis://unused".parse().unwrap()).unwrap();
        let context = Context::new(config.settings, Arc::new(TokioClock::new()));
        let (ours, server) = tokio::io::duplex(1 << 16);
        let (pipeline, limit) = (Pipeline::new(Arc::default()), Duration::from_secs(60));
        let connection = pipeline.clone();
        tokio::spawn(async move {
            let transport = Transport { stream: Box::new(ours), socket: None, encrypted: false };
            let (server_clock, server_changed) = (ServerClock::default(), std::future::pending());
            connection.run(transport, &context, limit, &server_clock, server_changed).await
        });
        (pipeline, server)
    }

    /// Returns the names of all commands until the end of the connection.
    async fn commands(mut server: DuplexStream) -> Vec<String> {
        let (mut buffer, mut commands) = (Vec::new(), Vec::new());
        while let Some(command) = next_command(&mut server, &mut buffer).await {
            commands.push(command);
        }
        commands
    }

    /// A dropped session leaves the queue by a command that it does not wait for.
    #[tokio::test(start_paused = true)]
    async fn queued_commands_are_sent_before_a_graceful_close() {
        for (cause, sent) in [(error::closed(), &["LEAVE"][..]), (error::disconnected(), &[])] {
            let (pipeline, server) = run();
            pipeline.send(|out| resp::write_command(out, &["LEAVE"]));
            pipeline.close_with(cause);
            assert_eq!(commands(server).await, sent);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn blocked_write_is_finished_before_a_graceful_close() {
        let (pipeline, server) = run();
        pipeline.send(|out| resp::write_command(out, &["LONG", &"x".repeat(1 << 17)]));
        // Until the write is blocked.
        tokio::time::sleep(Duration::from_millis(10)).await;
        pipeline.send(|out| resp::write_command(out, &["LEAVE"]));
        pipeline.close_with(error::closed());
        assert_eq!(commands(server).await, ["LONG", "TIME", "LEAVE"]);
    }

    #[tokio::test(start_paused = true)]
    async fn graceful_close_of_a_blocked_connection_ends() {
        let (pipeline, mut server) = run();
        pipeline.send(|out| resp::write_command(out, &["LONG", &"x".repeat(1 << 17)]));
        tokio::time::sleep(Duration::from_millis(10)).await;
        let began = tokio::time::Instant::now();
        pipeline.close_with(error::closed());
        // Nothing is read, so only the end of the connection makes a write fail.
        while server.write_all(b"+OK\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }

    /// Replies at once to every command but `WAIT`, which takes [`WAIT_TIME`]. Returns the number of `WAIT` when the
    /// connection ends.
    async fn serve(mut server: DuplexStream) -> i64 {
        let (mut buffer, mut waits) = (Vec::new(), 0);
        while let Some(command) = next_command(&mut server, &mut buffer).await {
            let reply = match command.as_str() {
                "TIME" => "*2\r\n$1\r\n1\r\n$1\r\n0\r\n".to_owned(),
                "WAIT" => {
                    waits += 1;
                    tokio::time::sleep(WAIT_TIME).await;
                    format!(":{waits}\r\n")
                }
                _ => "+OK\r\n".to_owned(),
            };
            server.write_all(reply.as_bytes()).await.unwrap();
        }
        waits
    }

    const WAIT: [&str; 3] = ["WAIT", "1", "500"];
    const WAIT_TIME: Duration = Duration::from_millis(500);

    /// Writes, then waits for replicas.
    async fn acquire(pipeline: Pipeline) -> Reply {
        pipeline.call(&["SET", "key", "value"]).await.unwrap();
        pipeline.wait_for_replicas(&WAIT).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn acquisition_waits_for_at_most_two_waits_and_shares_the_second() {
        let (pipeline, server) = run();
        let server = tokio::spawn(serve(server));
        let first: Vec<_> = (0..40).map(|_| tokio::spawn(acquire(pipeline.clone()))).collect();
        tokio::time::sleep(WAIT_TIME / 2).await;
        let (began, wait) = (tokio::time::Instant::now(), WAIT_TIME);
        let second: Vec<_> = (0..40).map(|_| tokio::spawn(acquire(pipeline.clone()))).collect();
        for caller in first {
            assert_eq!(caller.await.unwrap(), Reply::Int(1));
        }
        for caller in second {
            assert_eq!(caller.await.unwrap(), Reply::Int(2));
        }
        // The rest of the `WAIT` before the writes, and the one that covers them.
        assert_eq!(began.elapsed(), wait / 2 + wait);
        pipeline.close_with(error::closed());
        assert_eq!(server.await.unwrap(), 2);
    }

    /// The task of the first caller is on another runtime, which is blocked.
    #[tokio::test(start_paused = true)]
    async fn caller_that_is_not_polled_delays_no_other() {
        let (pipeline, server) = run();
        tokio::spawn(serve(server));
        let mut stuck = Box::pin(pipeline.wait_for_replicas(&WAIT));
        assert!(futures_util::poll!(&mut stuck).is_pending());
        let other = tokio::time::timeout(WAIT_TIME * 3, acquire(pipeline.clone())).await;
        assert_eq!(other.expect("a reply"), Reply::Int(2));
        assert_eq!(stuck.await.unwrap(), Reply::Int(1));
    }
}
