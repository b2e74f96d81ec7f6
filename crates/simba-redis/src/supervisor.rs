//! Supervision of the command connections: one connection to one server, replaced when it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Clock, Error, Result};
use simba_net::supervise::{Connector, Retry, Supervised};
use simba_net::{ClockStep, ServerClock};
use tokio::sync::Notify;

use crate::config::{Address, Settings};
use crate::connection::{Connection, Transport};
use crate::error;
use crate::pipeline::spread::Spread;
use crate::pipeline::{CloseOnDrop, Pipeline};
use crate::resp::{self, Reply};
use crate::scripts::{Invocation, Script, Scripts};
use crate::sentinel::Sentinel;

/// Number of consecutive connections closed by the peer during the probe after which the probe is skipped: a proxy may
/// reject it.
const MAX_PROBE_HANG_UPS: u32 = 2;
/// Longest time of an attempt to connect. Each of its steps has a limit of its own, so no attempt takes that long.
pub(crate) const MAX_ATTEMPT: Duration = Duration::from_secs(3600);

/// A connection to a server. The server answers no call behind a `WAIT` until replicas have the writes before it, or
/// its time is over. So acquisitions that need replicas have a connection of their own: no renewal is behind a `WAIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Via {
    Main,
    /// Used only with `wait_replicas`.
    Acquisitions,
}

/// State that all connections of one handle share.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) scripts: Scripts,
    /// Whether keys of different mutexes are on different servers.
    pub(crate) spread: Arc<Spread>,
    /// Newest configuration epoch of the sentinels that this handle has followed.
    pub(crate) sentinel_epoch: AtomicU64,
    /// Notified when commands go to another server although the subscriber's connection was not lost.
    pub(crate) server_changed: Notify,
}

impl Context {
    pub(crate) fn new(settings: Settings, clock: Arc<dyn Clock>) -> Self {
        let scripts = Scripts::new(settings.fence_retention);
        let (spread, sentinel_epoch, server_changed) = (Arc::default(), AtomicU64::new(0), Notify::new());
        Self { settings, clock, scripts, spread, sentinel_epoch, server_changed }
    }

    /// Returns the time without a reply, while one is outstanding, after which a connection counts as broken.
    fn silence(&self, via: Via) -> Duration {
        let wait = self.settings.wait.filter(|_| via == Via::Acquisitions);
        // The server sends no replies during a `WAIT`.
        self.settings.timeout + wait.map_or(Duration::ZERO, |wait| wait.timeout)
    }

    /// Connects to a server and loads the scripts into it.
    pub(crate) async fn connect(&self, address: &Address) -> Result<Connection> {
        // On every connection: a restarted or promoted server may not have them, and a thousand concurrent calls would
        // each have to send the source.
        let load = self.scripts.load_commands();
        let (connection, replies) = match Connection::open(address, self, &self.settings.login, &load).await {
            Err(cause) if error::is_hang_up(&cause) => {
                return Err(self.explain_hang_up(address, cause).await);
            }
            opened => opened?,
        };
        self.scripts.store_digests(&replies).ok_or_else(|| error::unexpected("SCRIPT LOAD"))?;
        Ok(connection)
    }

    /// Returns why the peer closed a connection while scripts were loaded. A proxy without script support closes every
    /// connection at `SCRIPT LOAD`, and only there.
    async fn explain_hang_up(&self, address: &Address, cause: Error) -> Error {
        let Ok((mut connection, _)) = Connection::open(address, self, &self.settings.login, &[]).await else {
            return cause;
        };
        match connection.call(self, &["SCRIPT", "LOAD", "return 1"]).await {
            Err(again) if error::is_hang_up(&again) => error::no_scripts(address).with_source(again),
            _ => cause,
        }
    }
}

/// How to find the server to connect to.
#[derive(Clone)]
pub(crate) enum Source {
    /// A server or a proxy at a fixed address.
    Fixed(Address),
    /// A node of a cluster.
    Member(Address),
    /// The master that the sentinels name.
    Sentinel(Sentinel),
}

impl Source {
    pub(crate) async fn connect(&self, context: &Context) -> Result<(Connection, Address)> {
        match self {
            Self::Fixed(address) | Self::Member(address) => {
                context.connect(address).await.map(|connection| (connection, address.clone()))
            }
            Self::Sentinel(sentinel) => sentinel.connect(context).await,
        }
    }

    /// Completes when another server has to be used.
    async fn server_changed(&self, address: &Address, context: &Context) -> Error {
        match self {
            Self::Fixed(_) | Self::Member(_) => std::future::pending().await,
            Self::Sentinel(sentinel) => sentinel.master_changed(address, context).await,
        }
    }
}

/// One server with a supervised command connection.
pub(crate) struct Node {
    context: Arc<Context>,
    supervised: Arc<Supervised<Pipeline>>,
    server_clock: Arc<ServerClock>,
    /// Whether the last call was refused because the server is not a master.
    demoted: AtomicBool,
}

impl Node {
    /// Starts to connect, and reconnects from then on.
    pub(crate) fn start(source: Source, context: Arc<Context>, via: Via) -> Arc<Self> {
        let (supervised, server_clock) = (Arc::new(Supervised::new()), Arc::<ServerClock>::default());
        let mut connector = NodeConnector {
            source,
            context: Arc::clone(&context),
            via,
            server_clock: Arc::clone(&server_clock),
            opened: None,
            last: None,
            probe_hang_ups: 0,
        };
        let (run, clock) = (Arc::clone(&supervised), Arc::clone(&context.clock));
        tokio::spawn(async move { run.run(&mut connector, &*clock, Retry::default()).await });
        Arc::new(Self { context, supervised, server_clock, demoted: AtomicBool::new(false) })
    }

    /// Waits for the first connection.
    ///
    /// # Errors
    ///
    /// Why it cannot be opened.
    pub(crate) async fn connected(&self) -> Result<()> {
        self.supervised.connection().await.map(drop)
    }

    /// Returns the connection. Waits for one that is being opened, as long as for a reply.
    pub(crate) async fn pipeline(&self) -> Result<Pipeline> {
        match self.supervised.current() {
            Some(pipeline) => Ok(pipeline),
            // Boxed: it is rare, and its future is larger than that of the call.
            None => Box::pin(self.next_pipeline()).await,
        }
    }

    async fn next_pipeline(&self) -> Result<Pipeline> {
        let limit = self.context.settings.timeout;
        let next = within(&*self.context.clock, limit, self.supervised.connection()).await;
        next.unwrap_or_else(|| Err(error::silent(limit))).map_err(|cause| cause.with_backend(crate::NAME))
    }

    /// Returns the last step of the server's clock since the first connection.
    pub(crate) fn clock_step(&self) -> Option<ClockStep> {
        self.server_clock.last_step()
    }

    /// Sends a call and ignores its reply. Does nothing without a connection.
    pub(crate) fn send(&self, call: &Invocation<'_>) {
        if let Some(pipeline) = self.supervised.current() {
            pipeline.send(|out| call.write(out, &self.context.scripts));
        }
    }

    /// Runs a script. Returns the reply, which may be an error reply, and the connection that it came from.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipeline)> {
        let pipeline = self.pipeline().await?;
        let scripts = &self.context.scripts;
        let mut reply = pipeline.invoke(call, scripts).await?;
        match &reply {
            Reply::Nil => reply = pipeline.call_with(|out| call.write(out, scripts)).await?,
            reply if is_script_missing(reply) && call.fast_path.is_some() => {
                let load = ["SCRIPT", "LOAD", scripts.source(Script::Many)];
                pipeline.send(|out| resp::write_command(out, &load));
            }
            _ => {}
        }
        if is_script_missing(&reply) {
            reply = pipeline.call_with(|out| call.write_source(out, scripts)).await?;
        }
        self.follow_master(&reply, &pipeline);
        Ok((reply, pipeline))
    }

    /// Closes the connection to a server that was demoted: a reconnect may reach the new master, by the sentinels, DNS
    /// or a virtual address. Once it does, the subscriptions have to follow.
    fn follow_master(&self, reply: &Reply, pipeline: &Pipeline) {
        match reply {
            Reply::Error(message) if error::is_not_master(message) => {
                self.demoted.store(true, Ordering::Relaxed);
                pipeline.close_with(error::refused(message));
            }
            Reply::Error(_) => {}
            // The old master passes messages on late, and the new master does not count its subscribers.
            _ if self.demoted.load(Ordering::Relaxed) => {
                self.demoted.store(false, Ordering::Relaxed);
                self.context.server_changed.notify_one();
            }
            _ => {}
        }
    }

    /// Closes the connection for good, with this cause.
    pub(crate) fn close(&self, cause: Error) {
        // First: the end of the supervision closes the connection with another cause.
        if let Some(pipeline) = self.supervised.current() {
            pipeline.close_with(cause);
        }
        self.supervised.close();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.close(error::disconnected());
    }
}

/// Returns whether an error reply says that the server no longer has the script.
fn is_script_missing(reply: &Reply) -> bool {
    matches!(reply, Reply::Error(message) if message.starts_with("NOSCRIPT"))
}

/// Opens and runs the connections of a [`Node`].
struct NodeConnector {
    source: Source,
    context: Arc<Context>,
    via: Via,
    server_clock: Arc<ServerClock>,
    /// The connection that is about to run.
    opened: Option<Transport>,
    /// Address of the last connection.
    last: Option<Address>,
    probe_hang_ups: u32,
}

impl Connector for NodeConnector {
    type Connection = Pipeline;

    fn limit(&self) -> Duration {
        MAX_ATTEMPT
    }

    async fn connect(&mut self, _: usize) -> Result<Pipeline> {
        let (connection, address) = self.source.connect(&self.context).await?;
        self.opened = Some(connection.into_transport()?);
        if self.last.replace(address.clone()).is_some_and(|last| last != address) {
            // Subscriptions may still be at the old master, which may not have noticed its demotion.
            self.context.server_changed.notify_one();
        }
        let pipeline = Pipeline::new(Arc::clone(&self.context.spread));
        // Calls to a cluster are never batched, so its nodes need no probe.
        if !matches!(self.source, Source::Member(_)) && self.probe_hang_ups < MAX_PROBE_HANG_UPS {
            pipeline.probe_spread();
        }
        Ok(pipeline)
    }

    async fn serve(&mut self, pipeline: &Pipeline) -> Error {
        let (Some(transport), Some(address)) = (self.opened.take(), self.last.clone()) else {
            return error::disconnected();
        };
        tracing::debug!(server = %address, "connected");
        let (source, context) = (self.source.clone(), Arc::clone(&self.context));
        let (silence, server_clock) = (self.context.silence(self.via), Arc::clone(&self.server_clock));
        let connection = pipeline.clone();
        // A task of its own: this future is dropped when the handle is closed, and what is queued must still be sent.
        let run = tokio::spawn(async move {
            let server_changed = source.server_changed(&address, &context);
            connection.run(transport, &context, silence, &server_clock, server_changed).await
        });
        let _close = CloseOnDrop(pipeline);
        let cause = run.await.unwrap_or_else(|_| error::disconnected());
        let at_probe = pipeline.is_probing() && error::is_hang_up(&cause);
        self.probe_hang_ups = if at_probe { self.probe_hang_ups + 1 } else { 0 };
        cause
    }
}

#[cfg(test)]
mod tests {
    use simba_core::{ErrorKind, MutexName, TokioClock};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::config::{RedisConfig, Topology};

    /// Replies to the login, and to nothing after it. Returns the commands after the login.
    async fn serve_login(listener: tokio::net::TcpListener) -> Vec<String> {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut buffer, mut commands, mut logged_in) = (Vec::new(), Vec::new(), 0);
        while stream.read_buf(&mut buffer).await.unwrap() > 0 {
            while let Some((command, length)) = resp::parse(&buffer).unwrap() {
                buffer.drain(..length);
                if logged_in <= Script::ALL.len() {
                    logged_in += 1;
                    stream.write_all(b"+OK\r\n").await.unwrap();
                } else {
                    commands.push(command.array().unwrap()[0].text().unwrap().into());
                }
            }
        }
        commands
    }

    /// With more than three calls outstanding, a command is left to the connection's task, which the close ends.
    #[tokio::test]
    async fn command_that_is_sent_just_before_the_close_arrives() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        let config = RedisConfig::from_url(&"redis://unused?timeout=10s".parse().unwrap()).unwrap();
        let context = Arc::new(Context::new(config.settings, Arc::new(TokioClock::new())));
        let server = tokio::spawn(serve_login(listener));
        let node = Node::start(Source::Member(address), context, Via::Main);
        let pipeline = node.pipeline().await.unwrap();
        let mut calls = Vec::from_iter((0..8).map(|_| Box::pin(pipeline.call(&["CALL"]))));
        for call in &mut calls {
            assert!(futures_util::poll!(call).is_pending());
        }
        let mutex = MutexName::new("m").unwrap();
        node.send(&Invocation::new(Script::Release, &mutex, &[]));
        node.close(error::closed());
        for call in calls {
            assert_eq!(call.await.unwrap_err().kind(), ErrorKind::Closed);
        }
        let commands = server.await.unwrap();
        assert_eq!(commands.last().map(String::as_str), Some("EVALSHA"), "{commands:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn first_call_waits_for_the_first_connection_as_long_as_for_a_reply() {
        // Accepts connections and never replies.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", silent.local_addr().unwrap());
        let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap();
        let Topology::Standalone(address) = config.topology else { panic!("one server") };
        let context = Arc::new(Context::new(config.settings, Arc::new(TokioClock::new())));
        let node = Node::start(Source::Fixed(address), Arc::clone(&context), Via::Main);
        let began = context.clock.now();
        assert!(node.pipeline().await.is_err());
        assert!(context.clock.now() - began >= context.settings.timeout);
    }
}
