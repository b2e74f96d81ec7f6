//! One connection to the server: greets it, sends requests, and matches replies to them by their order.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, FencingToken, Result};
use simba_net::supervise::{self, Connector, ping_until_silent};
use simba_net::{Endpoint, dial};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::{CLOCK_ERROR, error};

/// The longest time to open a connection, and to answer a ping.
const LIMIT: Duration = Duration::from_secs(3);
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// The largest number of requests that are sent together.
const MAX_REQUESTS: usize = 100;
/// The longest line and the largest value that are accepted, in bytes.
const MAX_SIZE: usize = 2048;
/// The settings of a server that forgets no mutex, and the options that set them.
const SETTINGS: [(&str, &str, &str); 4] = [
    ("cas_enabled", "yes", "without -C"),
    ("evictions", "off", "with -M"),
    ("flush_enabled", "no", "with -F"),
    ("slab_reassign", "no", "with -o no_slab_reassign"),
];

/// A handle on an open connection.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    requests: mpsc::UnboundedSender<Request>,
    /// When the server started, in seconds of its wall clock.
    server_start: u64,
}

#[derive(Debug)]
struct Request {
    text: String,
    reply: oneshot::Sender<Reply>,
}

impl supervise::Connection for Connection {
    fn is_open(&self) -> bool {
        !self.requests.is_closed()
    }
}

impl Connection {
    /// Sends a request and returns the reply to it.
    ///
    /// # Errors
    ///
    /// The connection ended before the reply: the outcome is unknown.
    ///
    /// # Cancel safety
    ///
    /// A dropped call is sent before all later ones. Its reply is discarded.
    pub(crate) async fn call(&self, text: String) -> Result<Reply> {
        let (sender, reply) = oneshot::channel();
        // If the connection has ended, the request is dropped with its sender, and `reply` fails.
        let _ = self.requests.send(Request { text, reply: sender });
        reply.await.map_err(|_| error(ErrorKind::Unavailable, "the connection ended before the reply"))
    }

    /// Returns the token of a tenure that began with this write.
    pub(crate) fn token(&self, number: u64) -> FencingToken {
        FencingToken::new((self.server_start << 20) + number)
    }
}

/// A reply: a line with a status and flags, such as `VA 20 c17 t9`, and the value of an item.
#[derive(Debug)]
pub(crate) struct Reply {
    line: String,
    pub(crate) value: String,
}

impl Reply {
    pub(crate) fn status(&self) -> &str {
        self.line.split(' ').next().unwrap_or_default()
    }

    pub(crate) fn flag(&self, name: char) -> Option<u64> {
        self.line.split(' ').skip(1).find_map(|flag| flag.strip_prefix(name)?.parse().ok())
    }

    /// Returns the error for a reply without an answer, such as `SERVER_ERROR out of memory storing object`.
    pub(crate) fn unexpected(&self) -> Error {
        error(ErrorKind::Unavailable, format!("the server replied `{}`", self.line))
    }
}

/// Opens and runs connections to the server, one at a time.
pub(crate) struct Server<'a> {
    endpoint: Endpoint,
    longest_lease: Duration,
    clock: &'a dyn Clock,
    /// What [`Connector::connect`] creates for [`Connector::serve`].
    opened: Option<(BufReader<TcpStream>, mpsc::UnboundedReceiver<Request>)>,
}

impl<'a> Server<'a> {
    pub(crate) fn new(endpoint: Endpoint, longest_lease: Duration, clock: &'a dyn Clock) -> Self {
        Self { endpoint, longest_lease, clock, opened: None }
    }
}

impl Connector for Server<'_> {
    type Connection = Connection;

    fn limit(&self) -> Duration {
        LIMIT
    }

    async fn connect(&mut self, _: usize) -> Result<Connection> {
        let Endpoint { host, port } = &self.endpoint;
        let mut stream = BufReader::new(dial(host, *port, LIMIT, self.clock).await.map_err(unavailable)?);
        let server_start = greet(&mut stream, self.longest_lease).await?;
        let (requests, receiver) = mpsc::unbounded_channel();
        self.opened = Some((stream, receiver));
        Ok(Connection { requests, server_start })
    }

    async fn serve(&mut self, connection: &Connection) -> Error {
        let Some((mut stream, mut requests)) = self.opened.take() else {
            return error(ErrorKind::Closed, "the connection was served before");
        };
        let ping = || async { connection.call("mn\r\n".into()).await.map(drop) };
        tokio::select! {
            error = exchange(&mut stream, &mut requests) => error,
            error = ping_until_silent(self.clock, PING_INTERVAL, LIMIT, ping) => error,
        }
    }
}

/// Sends the requests that wait, receives a reply to each, and begins again, until the connection ends. Then all
/// requests are dropped, and their calls fail.
async fn exchange(
    stream: &mut BufReader<TcpStream>,
    requests: &mut mpsc::UnboundedReceiver<Request>,
) -> Error {
    let mut batch = Vec::new();
    while requests.recv_many(&mut batch, MAX_REQUESTS).await > 0 {
        let texts: String = batch.iter().map(|request| request.text.as_str()).collect();
        if let Err(failure) = stream.write_all(texts.as_bytes()).await {
            return unavailable(failure);
        }
        for request in batch.drain(..) {
            match read_reply(stream).await {
                // The caller may have been dropped.
                Ok(reply) => drop(request.reply.send(reply)),
                Err(failure) => return failure,
            }
        }
    }
    error(ErrorKind::Closed, "the handle is closed")
}

/// Checks that the server forgets no mutex, and returns when it started.
async fn greet(stream: &mut BufReader<TcpStream>, longest_lease: Duration) -> Result<u64> {
    let settings = statistics(stream, "stats settings\r\n").await?;
    for (name, wanted, option) in SETTINGS {
        if settings.get(name).is_none_or(|value| value != wanted) {
            let message =
                format!("the server may forget mutexes ({name} is not {wanted}): start it {option}");
            return Err(error(ErrorKind::Config, message));
        }
    }
    let general = statistics(stream, "stats\r\n").await?;
    let number = |name| general.get(name).and_then(|value| value.parse::<u64>().ok());
    let Some((time, uptime)) = number("time").zip(number("uptime")) else {
        return Err(error(ErrorKind::Protocol, "the server does not report its time and uptime"));
    };
    // Holders from before a restart may still be valid. At least a second, so that no two servers start in the same one.
    if Duration::from_secs(uptime) < longest_lease.max(Duration::from_secs(1)) + CLOCK_ERROR {
        let message =
            format!("the server started {uptime} s ago: wait until it has run for the longest_lease");
        return Err(error(ErrorKind::Unavailable, message));
    }
    Ok(time.saturating_sub(uptime))
}

/// Requests statistics. The reply has lines `STAT name value` and ends with a line `END`.
async fn statistics(stream: &mut BufReader<TcpStream>, request: &str) -> Result<HashMap<String, String>> {
    stream.write_all(request.as_bytes()).await.map_err(unavailable)?;
    let mut values = HashMap::new();
    loop {
        let line = read_line(stream).await?;
        match line.strip_prefix("STAT ").and_then(|stat| stat.split_once(' ')) {
            Some((name, value)) => values.insert(name.to_owned(), value.to_owned()),
            None if line == "END" => return Ok(values),
            None => return Err(error(ErrorKind::Protocol, format!("the server replied `{line}` to stats"))),
        };
    }
}

async fn read_reply(stream: &mut BufReader<TcpStream>) -> Result<Reply> {
    let line = read_line(stream).await?;
    let mut reply = Reply { line, value: String::new() };
    match reply.status() {
        "VA" => {
            let size = reply.line.split(' ').nth(1).and_then(|size| size.parse().ok());
            let size: usize = size.filter(|size| *size <= MAX_SIZE).ok_or_else(|| reply.unexpected())?;
            // A line end follows the value.
            let mut value = vec![0; size + 2];
            stream.read_exact(&mut value).await.map_err(unavailable)?;
            reply.value = String::from_utf8_lossy(&value[..size]).into_owned();
            Ok(reply)
        }
        "HD" | "EN" | "NS" | "EX" | "NF" | "MN" | "SERVER_ERROR" => Ok(reply),
        // The server did not understand the request. The next reply might belong to the rest of it.
        _ => Err(reply.unexpected()),
    }
}

async fn read_line(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    stream.take(MAX_SIZE as u64).read_line(&mut line).await.map_err(unavailable)?;
    let whole = line.strip_suffix("\r\n").map(str::to_owned);
    whole.ok_or_else(|| error(ErrorKind::Unavailable, "the server ended the connection"))
}

fn unavailable(source: io::Error) -> Error {
    error(ErrorKind::Unavailable, "the server cannot be reached").with_source(source)
}
