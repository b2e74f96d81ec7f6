//! The fault rows about processes, on the shared MariaDB and MySQL.

mod common;

mod on_mariadb {
    simba_tck::processes!(crate::common::MySql);
}

mod on_mysql {
    simba_tck::processes!(crate::common::OnMySql);
}
