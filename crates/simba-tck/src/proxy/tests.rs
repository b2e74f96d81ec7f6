use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::*;

/// Time limit for everything that must happen.
const LIMIT: Duration = Duration::from_secs(60);
/// How long to wait where nothing must happen. A slow machine may hide a fault here, but never causes one.
const QUIET: Duration = Duration::from_millis(30);

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(LIMIT, future).await.expect("it takes too long")
}

/// A proxy and the server behind it.
struct Net {
    proxy: FaultProxy,
    server: TcpListener,
}

impl Net {
    async fn new() -> Self {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = FaultProxy::start(server.local_addr().unwrap()).await.unwrap();
        Self { proxy, server }
    }

    /// Creates a proxy with one connection.
    async fn joined() -> (Self, End, End) {
        let net = Self::new().await;
        let (client, server) = net.join().await;
        (net, client, server)
    }

    async fn connect(&self) -> End {
        let stream = within(TcpStream::connect(self.proxy.address())).await.unwrap();
        stream.set_nodelay(true).unwrap();
        End(stream)
    }

    async fn accept(&self) -> End {
        End(within(self.server.accept()).await.unwrap().0)
    }

    async fn accepts_nothing(&self) {
        timeout(QUIET, self.server.accept()).await.unwrap_err();
    }

    async fn join(&self) -> (End, End) {
        (self.connect().await, self.accept().await)
    }

    async fn requests(&self, number: usize) {
        within(self.proxy.until(|counts| counts.requests == number)).await;
        assert_eq!(self.proxy.requests(), number);
    }

    async fn connections(&self, number: usize) {
        within(self.proxy.until(|counts| counts.connections == number)).await;
        assert_eq!(self.proxy.connections(), number);
    }

    async fn accepted(&self, number: usize) {
        within(self.proxy.until(|counts| counts.accepted == number)).await;
        assert_eq!(self.proxy.accepted(), number);
    }
}

/// One end of a connection.
struct End(TcpStream);

impl End {
    async fn send(&mut self, text: &str) {
        within(self.0.write_all(text.as_bytes())).await.unwrap();
    }

    async fn gets(&mut self, text: &str) {
        let mut bytes = vec![0; text.len()];
        within(self.0.read_exact(&mut bytes)).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), text);
    }

    /// Checks that neither data nor the end arrives.
    async fn gets_nothing(&mut self) {
        timeout(QUIET, self.0.read(&mut [0])).await.unwrap_err();
    }

    async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    async fn sees_the_end(&mut self) {
        assert_eq!(within(self.0.read(&mut [0])).await.unwrap(), 0);
    }

    async fn sees_a_reset(&mut self) {
        let error = within(self.0.read(&mut [0])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

/// Checks that a connect is reset, at once or soon after.
async fn connect_is_reset(proxy: &FaultProxy) {
    match within(TcpStream::connect(proxy.address())).await {
        Ok(stream) => End(stream).sees_a_reset().await,
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

/// Checks that both ends can communicate.
async fn assert_connected(client: &mut End, server: &mut End) {
    client.send("request").await;
    server.gets("request").await;
    server.send("reply").await;
    client.gets("reply").await;
}

fn test_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::with_seed(1).fill(&mut bytes);
    bytes
}

/// Sends back all data, on every connection.
fn echo(server: TcpListener) {
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = server.accept().await {
            tokio::spawn(async move {
                let (mut requests, mut replies) = stream.split();
                tokio::io::copy(&mut requests, &mut replies).await?;
                replies.shutdown().await
            });
        }
    });
}

#[tokio::test]
async fn mebibyte_passes_both_directions_unchanged() {
    let Net { proxy, server } = Net::new().await;
    echo(server);
    let sent = test_bytes(1 << 20);
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    let (mut replies, mut requests) = client.split();
    let mut got = Vec::new();
    let send = async {
        requests.write_all(&sent).await?;
        requests.shutdown().await
    };
    let (done, read) = within(async { tokio::join!(send, replies.read_to_end(&mut got)) }).await;
    done.and(read.map(drop)).unwrap();
    assert!(got == sent, "{} bytes came back, changed", got.len());
    within(proxy.until(|counts| counts.connections == 0)).await;
}

#[tokio::test]
async fn half_close_leaves_the_other_half_open() {
    let (net, mut client, mut server) = Net::joined().await;
    client.half_close().await;
    server.sees_the_end().await;
    server.send("late").await;
    client.gets("late").await;
    server.half_close().await;
    client.sees_the_end().await;
    net.connections(0).await;
}

#[tokio::test]
async fn half_close_by_the_server_lets_requests_through() {
    let (_net, mut client, mut server) = Net::joined().await;
    server.half_close().await;
    client.sees_the_end().await;
    client.send("late").await;
    server.gets("late").await;
}

#[tokio::test]
async fn reset_of_one_end_reaches_the_other() {
    let (net, client, mut server) = Net::joined().await;
    client.0.set_zero_linger().unwrap();
    drop(client);
    server.sees_a_reset().await;
    let (mut client, server) = net.join().await;
    server.0.set_zero_linger().unwrap();
    drop(server);
    client.sees_a_reset().await;
    net.connections(0).await;
}

#[tokio::test]
async fn refusing_server_resets_the_client() {
    let Net { proxy, server } = Net::new().await;
    drop(server);
    connect_is_reset(&proxy).await;
    within(proxy.until(|counts| counts.accepted == 1 && counts.connections == 0)).await;
}

#[tokio::test]
async fn stall_blocks_both_directions_and_keeps_the_order() {
    let (net, mut client, mut server) = Net::joined().await;
    assert_connected(&mut client, &mut server).await;
    net.proxy.stall();
    client.send("1").await;
    net.requests(2).await;
    client.send("2").await;
    server.send("a").await;
    server.send("b").await;
    server.gets_nothing().await;
    client.gets_nothing().await;
    assert_eq!((net.proxy.connections(), net.proxy.requests()), (1, 2), "it reads one buffer and no more");
    net.proxy.pass();
    client.send("3").await;
    server.gets("123").await;
    client.gets("ab").await;
}

#[tokio::test]
async fn stall_accepts_connects_and_forwards_none() {
    let net = Net::new().await;
    net.proxy.stall();
    let mut client = net.connect().await;
    client.send("early").await;
    net.connections(1).await;
    net.accepts_nothing().await;
    net.proxy.pass();
    net.accept().await.gets("early").await;
}

#[tokio::test]
async fn stall_blocks_a_sender_once_buffers_are_full() {
    const MUCH: usize = 48 << 20;
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall();
    let send = tokio::spawn(async move {
        client.0.write_all(&test_bytes(MUCH)).await.unwrap();
        client
    });
    net.requests(1).await;
    server.gets_nothing().await;
    assert!(!send.is_finished());
    assert_eq!(net.proxy.requests(), 1);
    net.proxy.pass();
    let mut got = vec![0; MUCH];
    within(server.0.read_exact(&mut got)).await.unwrap();
    assert!(got == test_bytes(MUCH), "the data was changed");
    within(send).await.unwrap();
}

#[tokio::test]
async fn stall_keeps_the_last_data_and_the_end_of_a_client() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall();
    client.send("last data").await;
    drop(client);
    server.gets_nothing().await;
    net.proxy.pass();
    server.gets("last data").await;
    server.sees_the_end().await;
}

#[tokio::test]
async fn stalled_requests_let_replies_through() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall_requests();
    client.send("request").await;
    net.requests(1).await;
    server.send("reply").await;
    client.gets("reply").await;
    server.gets_nothing().await;
    let _second = net.connect().await;
    net.accepts_nothing().await;
    net.proxy.pass();
    server.gets("request").await;
    net.accept().await;
}

#[tokio::test]
async fn stalled_replies_let_requests_through() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall_replies();
    server.send("reply").await;
    client.send("request").await;
    server.gets("request").await;
    client.gets_nothing().await;
    let _second = net.join().await;
    net.proxy.pass();
    client.gets("reply").await;
}

#[tokio::test]
async fn of_two_stalls_the_last_one_counts() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall();
    client.send("request").await;
    server.send("reply").await;
    net.proxy.stall_replies();
    server.gets("request").await;
    client.gets_nothing().await;
    net.proxy.stall_requests();
    client.gets("reply").await;
}

#[tokio::test]
async fn delay_adds_at_least_the_latency_in_each_direction() {
    const LATENCY: Duration = Duration::from_millis(50);
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.delay(LATENCY, LATENCY);
    let sent = Instant::now();
    client.send("request").await;
    server.gets("request").await;
    assert!(sent.elapsed() >= LATENCY);
    server.send("reply").await;
    client.gets("reply").await;
    assert!(sent.elapsed() >= 2 * LATENCY);
}

#[tokio::test]
async fn delayed_chunks_do_not_wait_for_each_other_and_stay_in_order() {
    const CHUNKS: u8 = 60;
    const LATENCY: Duration = Duration::from_millis(300);
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.delay(LATENCY, LATENCY);
    let sent = Instant::now();
    for number in 1..=CHUNKS {
        client.0.write_all(&[number]).await.unwrap();
        net.requests(number.into()).await;
    }
    let mut got = Vec::new();
    within((&mut server.0).take(CHUNKS.into()).read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, (1..=CHUNKS).collect::<Vec<_>>());
    // If each chunk waited for the one before, all of them would take at least this long.
    assert!(sent.elapsed() < LATENCY * u32::from(CHUNKS), "{:?}", sent.elapsed());
}

#[tokio::test]
async fn delayed_data_arrives_when_the_network_heals() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.delay(Duration::MAX, Duration::ZERO);
    client.send("1").await;
    net.requests(1).await;
    server.gets_nothing().await;
    net.proxy.pass();
    client.send("2").await;
    server.gets("12").await;
}

#[tokio::test]
async fn delayed_data_does_not_pass_a_stall() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.delay(Duration::from_millis(1), Duration::ZERO);
    net.proxy.stall();
    client.send("1").await;
    net.requests(1).await;
    server.gets_nothing().await;
    net.proxy.pass();
    server.gets("1").await;
}

#[tokio::test]
async fn refused_connections_are_reset_and_open_ones_stay() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.refuse();
    connect_is_reset(&net.proxy).await;
    net.accepted(2).await;
    assert_connected(&mut client, &mut server).await;
    net.accepts_nothing().await;
    assert_eq!(net.proxy.connections(), 1);
    net.proxy.pass();
    let (mut client, mut server) = net.join().await;
    assert_connected(&mut client, &mut server).await;
}

#[tokio::test]
async fn cut_resets_both_ends_and_not_new_connections() {
    let (net, mut client, mut server) = Net::joined().await;
    assert_connected(&mut client, &mut server).await;
    let waiting = tokio::spawn(async move { client.sees_a_reset().await });
    net.proxy.cut();
    within(waiting).await.unwrap();
    server.sees_a_reset().await;
    net.connections(0).await;
    let (mut client, mut server) = net.join().await;
    assert_connected(&mut client, &mut server).await;
}

#[tokio::test]
async fn cut_resets_stalled_connections() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.stall();
    client.send("request").await;
    net.requests(1).await;
    let mut waiting = net.connect().await;
    net.connections(2).await;
    net.proxy.cut();
    client.sees_a_reset().await;
    waiting.sees_a_reset().await;
    server.sees_a_reset().await;
    net.connections(0).await;
}

#[tokio::test]
async fn lost_reply_is_dropped_and_its_connection_reset() {
    let (net, mut client, mut server) = Net::joined().await;
    let (mut other_client, mut other_server) = net.join().await;
    net.proxy.drop_next_reply();
    server.send("news").await;
    client.gets("news").await;
    client.send("request").await;
    server.gets("request").await;
    assert_connected(&mut other_client, &mut other_server).await;
    server.send("reply").await;
    client.sees_a_reset().await;
    server.sees_a_reset().await;
    assert_connected(&mut other_client, &mut other_server).await;
}

#[tokio::test]
async fn replies_are_lost_as_often_as_requested() {
    let net = Net::new().await;
    net.proxy.drop_next_reply();
    net.proxy.drop_next_reply();
    for _ in 0..2 {
        let (mut client, mut server) = net.join().await;
        for number in ["1", "2"] {
            client.send(number).await;
            server.gets(number).await;
        }
        server.send("reply").await;
        client.sees_a_reset().await;
    }
    let (mut client, mut server) = net.join().await;
    assert_connected(&mut client, &mut server).await;
}

#[tokio::test]
async fn pass_cancels_a_lost_reply() {
    let (net, mut client, mut server) = Net::joined().await;
    net.proxy.drop_next_reply();
    net.proxy.pass();
    assert_connected(&mut client, &mut server).await;
}

#[tokio::test]
async fn delivered_request_arrives_before_later_ones() {
    let (net, mut client, mut server) = Net::joined().await;
    let mut held = net.proxy.hold_next_request();
    client.send("1").await;
    within(held.caught()).await;
    within(held.caught()).await;
    client.send("2").await;
    server.send("news").await;
    client.gets("news").await;
    server.gets_nothing().await;
    let (mut other_client, mut other_server) = net.join().await;
    assert_connected(&mut other_client, &mut other_server).await;
    held.deliver();
    server.gets("12").await;
    assert_connected(&mut client, &mut server).await;
}

#[tokio::test]
async fn request_is_held_by_its_content() {
    let (net, mut client, mut server) = Net::joined().await;
    let mut held = net.proxy.hold_next_request_with(&["take", "give"]);
    assert_connected(&mut client, &mut server).await;
    client.send("to take it").await;
    within(held.caught()).await;
    server.gets_nothing().await;
    held.deliver();
    server.gets("to take it").await;
    client.send("to take it again").await;
    server.gets("to take it again").await;
}

#[tokio::test]
async fn held_request_arrives_after_its_client_has_closed() {
    let (net, mut client, mut server) = Net::joined().await;
    let mut held = net.proxy.hold_next_request();
    client.send("request").await;
    within(held.caught()).await;
    drop(client);
    server.gets_nothing().await;
    let answered = tokio::spawn(held.deliver_and_wait());
    server.gets("request").await;
    server.gets_nothing().await;
    assert!(!answered.is_finished());
    server.send("reply").await;
    within(answered).await.unwrap();
    server.sees_the_end().await;
}

#[tokio::test]
async fn held_request_arrives_after_its_client_was_reset() {
    let (net, mut client, mut server) = Net::joined().await;
    let mut held = net.proxy.hold_next_request();
    client.send("request").await;
    within(held.caught()).await;
    client.0.set_zero_linger().unwrap();
    drop(client);
    server.send("news").await;
    server.send("more").await;
    server.gets_nothing().await;
    held.deliver();
    server.gets("request").await;
    server.gets_nothing().await;
    server.send("reply").await;
    server.sees_a_reset().await;
    net.connections(0).await;
}

#[tokio::test]
async fn dropped_held_request_is_discarded() {
    let (net, mut client, mut server) = Net::joined().await;
    let mut held = net.proxy.hold_next_request();
    client.send("request").await;
    within(held.caught()).await;
    drop(held);
    client.sees_a_reset().await;
    server.sees_a_reset().await;
}

#[tokio::test]
async fn no_request_is_held_after_drop_or_deliver() {
    let (net, mut client, mut server) = Net::joined().await;
    drop(net.proxy.hold_next_request());
    net.proxy.hold_next_request().deliver();
    assert_connected(&mut client, &mut server).await;
    let mut held = net.proxy.hold_next_request();
    client.send("held").await;
    within(held.caught()).await;
    net.proxy.pass();
    server.gets_nothing().await;
    net.proxy.cut();
    client.sees_a_reset().await;
    held.deliver();
}

#[tokio::test]
async fn dropping_the_proxy_closes_everything() {
    let (net, mut client, mut server) = Net::joined().await;
    assert_connected(&mut client, &mut server).await;
    net.proxy.stall();
    let mut held = net.proxy.hold_next_request();
    let address = net.proxy.address();
    drop(net.proxy);
    let error = TcpStream::connect(address).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    client.sees_the_end().await;
    server.sees_the_end().await;
    within(held.caught()).await;
}

#[tokio::test]
async fn hundred_connections_at_once_work() {
    let Net { proxy, server } = Net::new().await;
    echo(server);
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.push(End(TcpStream::connect(proxy.address()).await.unwrap()));
    }
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(&number.to_string()).await;
    }
    for (number, client) in clients.iter_mut().enumerate() {
        client.gets(&number.to_string()).await;
    }
    assert_eq!((proxy.connections(), proxy.accepted(), proxy.requests()), (100, 100, 100));
    proxy.cut();
    for client in &mut clients {
        client.sees_a_reset().await;
    }
    within(proxy.until(|counts| counts.connections == 0)).await;
}

#[test]
fn proxy_survives_its_runtime_and_serves_blocking_threads() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let started = Builder::new_current_thread().build().unwrap();
    let proxy = started.block_on(FaultProxy::start(server.local_addr().unwrap())).unwrap();
    drop(started);
    let mut client = std::net::TcpStream::connect(proxy.address()).unwrap();
    client.write_all(b"hello").unwrap();
    let mut bytes = [0; 5];
    let (mut server, _) = server.accept().unwrap();
    server.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    thread::scope(|scope| scope.spawn(|| proxy.cut()).join()).unwrap();
    assert_eq!(client.read(&mut bytes).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test(start_paused = true)]
async fn virtual_time_of_the_caller_does_not_shorten_a_delay() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = FaultProxy::start(server.local_addr().unwrap()).await.unwrap();
    proxy.delay(QUIET, Duration::ZERO);
    let sent = Instant::now();
    let mut client = std::net::TcpStream::connect(proxy.address()).unwrap();
    client.write_all(b"x").unwrap();
    server.accept().unwrap().0.read_exact(&mut [0]).unwrap();
    assert!(sent.elapsed() >= QUIET);
}

#[test]
fn handles_are_send_and_sync() {
    fn assert_send_sync<T: Send + Sync + 'static>() {}
    assert_send_sync::<FaultProxy>();
    assert_send_sync::<Held>();
}

#[tokio::test]
async fn debug_shows_the_seed() {
    let proxy = FaultProxy::with_seed("localhost:1", 42).await.unwrap();
    let debug = format!("{proxy:?}");
    assert!(debug.contains("seed: 42") && debug.contains("localhost:1"), "{debug}");
}
