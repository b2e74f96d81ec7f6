//! The whole kit on the shared MariaDB and on the shared MySQL, as the user with the least rights, through a network that breaks.

mod common;

mod on_mariadb {
    simba_tck::suite!(crate::common::MySql::shared());
}

mod on_mysql {
    simba_tck::suite!(crate::common::Product::MySql.fixture());
}
