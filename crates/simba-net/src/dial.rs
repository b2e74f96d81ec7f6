use std::io;
use std::time::Duration;

use simba_core::{Clock, within};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// A connection without a sign of life is asked for one after this long.
const IDLE: Duration = Duration::from_secs(5);
/// How often it is asked again, and how many times.
const INTERVAL: Duration = Duration::from_secs(2);
#[cfg(not(windows))]
const PROBES: u32 = 3;
/// How long what was sent may stay unconfirmed before the connection counts as broken.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNCONFIRMED: Duration = Duration::from_secs(10);

/// Connects to `host:port` within `limit`, with a socket that sends at once and notices when its peer is gone.
///
/// # Errors
///
/// The host cannot be found, refuses, or does not answer in time.
///
/// # Cancel safety
///
/// A dropped call leaves no connection behind.
pub async fn dial(host: &str, port: u16, limit: Duration, clock: &dyn Clock) -> io::Result<TcpStream> {
    let connected = within(clock, limit, TcpStream::connect((host, port))).await;
    let stream = connected.unwrap_or_else(|| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {limit:?}")))
    })?;
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream)
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(IDLE).with_interval(INTERVAL);
    #[cfg(not(windows))]
    let keepalive = keepalive.with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(UNCONFIRMED))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;
    use tokio::net::TcpListener;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn a_socket_sends_at_once_and_notices_a_dead_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream = dial("localhost", port, LIMIT, &SystemClock).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNCONFIRMED));
    }

    #[tokio::test]
    async fn a_refused_connection_is_told_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let refused = dial("127.0.0.1", port, LIMIT, &SystemClock).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn a_host_that_does_not_answer_costs_no_more_than_the_limit() {
        // A full backlog leaves a connect unanswered, on any machine and without a network.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let _fills = std::net::TcpStream::connect(address).unwrap();
        let limit = Duration::from_millis(50);
        let late = dial("127.0.0.1", address.port(), limit, &SystemClock).await.unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }
}
