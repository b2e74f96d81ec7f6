use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use simba_core::Clock;
use simba_core::spi::within;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, lookup_host};

/// The time that an address has before the next one is tried in parallel, as RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);
/// The idle time after which the kernel sends the first keepalive probe.
const IDLE: Duration = Duration::from_secs(5);
/// The interval between keepalive probes, and their number.
const INTERVAL: Duration = Duration::from_secs(2);
#[cfg(not(windows))]
const PROBES: u32 = 3;
/// The time that sent data may stay unacknowledged before the kernel breaks the connection.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNCONFIRMED: Duration = Duration::from_secs(10);

/// Connects to `host:port` within `limit`. The socket sends without delay and detects a dead peer.
///
/// A name may have several addresses. The next one is tried when the last one failed or did not answer within 250 ms,
/// or an equal share of `limit` if that is less. The first address that answers is used. An address that does not
/// answer does not prevent the others from being tried.
///
/// `limit` covers everything: the name lookup and all addresses.
///
/// # Errors
///
/// Fails if the host cannot be resolved, or if no address answers in time. If all addresses refuse the connection, the
/// error is that of the last one.
///
/// # Cancel safety
///
/// A dropped call, and one whose limit has passed, leaves no connection behind. Its name lookup continues in a thread for
/// blocking calls until the system's resolver answers; the result is discarded.
pub async fn dial(host: &str, port: u16, limit: Duration, clock: &dyn Clock) -> io::Result<TcpStream> {
    let connecting = async {
        let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
        first_to_answer(addresses, limit, clock, TcpStream::connect).await
    };
    let stream = within(clock, limit, connecting).await.unwrap_or_else(|| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {limit:?}")))
    })?;
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream)
}

/// Orders addresses so that IPv4 and IPv6 alternate, beginning with the family of the first address. Often all
/// addresses of one family are unreachable.
fn alternating(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let begins_with_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == begins_with_v6);
    let mut second = second.into_iter();
    let mut ordered: Vec<_> =
        first.into_iter().flat_map(|address| [Some(address), second.next()]).flatten().collect();
    ordered.extend(second);
    ordered
}

/// Returns the first connection that `connect` establishes to any of `addresses`.
///
/// The next address is tried when the last one failed or did not answer within 250 ms, or an equal share of `limit` if
/// that is less. The two address families alternate. The caller enforces `limit` itself.
///
/// # Errors
///
/// If all addresses fail, returns the error of the last failure.
///
/// # Cancel safety
///
/// A dropped call drops the attempts in progress.
pub async fn first_to_answer<T, F>(
    addresses: Vec<SocketAddr>,
    limit: Duration,
    clock: &dyn Clock,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let addresses = alternating(addresses);
    let share = limit / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
    let mut addresses = addresses.into_iter();
    let mut attempts = FuturesUnordered::new();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    loop {
        let next = addresses.next();
        let is_last = next.is_none();
        attempts.extend(next.map(&connect));
        let share_over = clock.sleep_until(clock.now() + share.min(HEAD_START));
        tokio::select! {
            biased;
            outcome = attempts.next() => match outcome {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(error)) => failure = error,
                None => return Err(failure),
            },
            () = share_over, if !is_last => {}
        }
    }
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
    async fn a_socket_has_nodelay_keepalive_and_a_user_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream = dial("localhost", port, LIMIT, &SystemClock).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNCONFIRMED));
    }

    #[tokio::test]
    async fn a_refused_connection_is_reported_without_waiting_for_the_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let refused = dial("127.0.0.1", port, LIMIT, &SystemClock).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    /// A listener with a full backlog: it leaves a connect unanswered, on any machine and without a network.
    struct Unanswering {
        address: SocketAddr,
        _listener: socket2::Socket,
        _backlog: std::net::TcpStream,
    }

    impl Unanswering {
        fn bind(address: impl Into<SocketAddr>) -> Self {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&address.into().into()).unwrap();
            socket.listen(0).unwrap();
            let address = socket.local_addr().unwrap().as_socket().unwrap();
            let backlog = std::net::TcpStream::connect(address).unwrap();
            Self { address, _listener: socket, _backlog: backlog }
        }
    }

    #[tokio::test]
    async fn dial_to_a_host_that_does_not_answer_fails_after_the_limit() {
        let host = Unanswering::bind(([127, 0, 0, 1], 0));
        let limit = Duration::from_millis(50);
        let late = dial("127.0.0.1", host.address.port(), limit, &SystemClock).await.unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn the_last_address_is_tried_if_the_others_refuse_or_do_not_answer() {
        let silent = Unanswering::bind(([127, 0, 0, 1], 0));
        let other = Unanswering::bind(([127, 0, 0, 2], 0));
        let refusing = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap()
        };
        let answering = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wanted = answering.local_addr().unwrap();
        let addresses = vec![silent.address, refusing, other.address, wanted];
        // Without the parallel attempts, the kernel's own connect timeout of two minutes would apply.
        let connected = within(
            &SystemClock,
            LIMIT * 6,
            first_to_answer(addresses, LIMIT, &SystemClock, TcpStream::connect),
        )
        .await;
        let stream = connected.expect("the last address is tried").unwrap();
        assert_eq!(stream.peer_addr().unwrap(), wanted);
    }

    #[tokio::test]
    async fn the_last_address_gets_its_share_of_a_short_limit() {
        let silent: Vec<_> = (1..=40).map(|host| Unanswering::bind(([127, 0, 1, host], 0))).collect();
        let answering = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut addresses: Vec<_> = silent.iter().map(|host| host.address).collect();
        addresses.push(answering.local_addr().unwrap());
        let (began, limit) = (SystemClock.now(), Duration::from_millis(400));
        first_to_answer(addresses, limit, &SystemClock, TcpStream::connect).await.unwrap();
        // Ten seconds: enough room for a machine that pauses.
        let whole = 40 * HEAD_START;
        assert!(
            SystemClock.now() - began < whole,
            "a share of {limit:?} for each is far less than {whole:?}"
        );
    }

    #[tokio::test]
    async fn if_all_addresses_refuse_the_error_is_connection_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let refused = first_to_answer(vec![address, address], LIMIT, &SystemClock, TcpStream::connect)
            .await
            .unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let nothing = first_to_answer(Vec::new(), LIMIT, &SystemClock, TcpStream::connect).await.unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn address_families_alternate() {
        let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
        let [a, b, c] = ["[::1]:1", "[::2]:1", "[::3]:1"].map(parse);
        let [x, y] = ["127.0.0.1:1", "127.0.0.2:1"].map(parse);
        assert_eq!(alternating(vec![a, b, c, x, y]), [a, x, b, y, c]);
        assert_eq!(alternating(vec![x, y, a]), [x, a, y]);
        assert_eq!(alternating(vec![x, y]), [x, y]);
        assert_eq!(alternating(Vec::new()), []);
    }
}
